#!/usr/bin/env bash
# Builds LAMMPS with ML-IAP's Python interface, the host for which nvdd needs no plugin, to compare the two:
#
#   tools/build_lammps.sh [FOLDER]
#
# FOLDER (default: lammps-native in nvdd's cache, ~/.cache/nvdd or NVDD_CACHE) keeps source and build; a second call
# finds them. tests/nvdd_lammps/test_native_host.py runs when the build is there. It takes some minutes on two idle
# cores, 440 files. Needs cmake, ninja, a C++ compiler, and in the Python named by PYTHON (python3): mpich, numpy.
#
#   JOBS   parallel compilers (all cores)       SUITE  Debian suite of the source (sid)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${NVDD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/nvdd}
folder=$(mkdir -p "${1:-$cache/lammps-native}" && cd "${1:-$cache/lammps-native}" && pwd)
python=$(command -v "${PYTHON:-python3}")
bin=$(dirname "$python")
suite=${SUITE:-sid}
source=$("$here/fetch_lammps.sh" "$folder" "$suite")
build=$folder/build-$suite

if [ ! -e "$build/complete" ]; then
  # The interface is written in Cython, which nothing else here needs.
  [ -e "$folder/cython/cython.py" ] || "$python" -m pip install --quiet --target "$folder/cython" 'cython>=3'
  printf '#!/bin/sh\nexport PYTHONPATH=%s\nexec %s -m Cython.Build.Cythonize "$@"\n' "$folder/cython" "$python" >"$folder/cythonize"
  chmod +x "$folder/cythonize"
  cmake -S "$source/cmake" -B "$build" -G Ninja \
    -D CMAKE_BUILD_TYPE=None -D CMAKE_CXX_FLAGS=-O0 -D BUILD_SHARED_LIBS=ON -D BUILD_MPI=ON -D BUILD_OMP=OFF \
    -D PKG_ML-IAP=ON -D PKG_ML-SNAP=ON -D PKG_PYTHON=ON -D MLIAP_ENABLE_PYTHON=ON \
    -D "MPI_CXX_COMPILER=$bin/mpicxx" -D "Python_EXECUTABLE=$python" -D "Cythonize_EXECUTABLE=$folder/cythonize" \
    -D DOWNLOAD_POTENTIALS=OFF -D WITH_JPEG=OFF -D WITH_PNG=OFF -D WITH_FFMPEG=OFF -D WITH_CURL=OFF
  cmake --build "$build" -j "${JOBS:-$(nproc)}"
  touch "$build/complete"
fi
# `import lammps` with this on the path is this LAMMPS
mkdir -p "$folder/python"
ln -sfn "$source/python/lammps" "$folder/python/lammps"
ln -sfn "$build" "$folder/lib"
echo "$folder"
