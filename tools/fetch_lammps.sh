#!/usr/bin/env bash
# Fetches LAMMPS's source as Debian ships it into FOLDER, without touching the system's package lists:
#
#   tools/fetch_lammps.sh FOLDER [SUITE]
#
# SUITE is a Debian suite; sid (default) has LAMMPS of 4 Jul 2026, trixie that of 4 Feb 2025. Needs apt and Debian's
# archive key. The source lies in FOLDER/src-SUITE afterwards; a second call finds it there.
set -euo pipefail

folder=$(mkdir -p "${1:?usage: fetch_lammps.sh FOLDER [SUITE]}" && cd "$1" && pwd)
suite=${2:-sid}
target=$folder/src-$suite
if [ -f "$target/cmake/CMakeLists.txt" ]; then
  echo "$target"
  exit
fi
rm -rf "$target"

apt=$folder/apt
mkdir -p "$apt"/lists/partial "$apt"/archives/partial "$apt"/download
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${DEBIAN_MIRROR:-http://deb.debian.org/debian} $suite main" >"$apt/sources.list"
options=(
  -o "Dir::Etc::SourceList=$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$apt/lists"
  -o "Dir::Cache=$apt" -o "Dir::Cache::Archives=$apt/archives" -o APT::Sandbox::User=root
)
apt-get "${options[@]}" update >&2
# The .dsc may be gone from a mirror that moves on; the original archive is what counts.
(cd "$apt/download" && apt-get "${options[@]}" source --download-only lammps >&2) || true
archive=$(ls "$apt"/download/lammps_*.orig.tar.* 2>/dev/null | tail -n 1)
if [ -z "$archive" ]; then
  echo "fetch_lammps: no source archive of lammps came from suite $suite" >&2
  exit 1
fi
rm -rf "$target.partial"
mkdir "$target.partial"
tar -xf "$archive" -C "$target.partial"
# some archives have one folder around everything
found=$(find "$target.partial" -maxdepth 3 -path '*/cmake/CMakeLists.txt' | head -n 1)
mv "${found%/cmake/CMakeLists.txt}" "$target"
rm -rf "$target.partial"
echo "$target"
