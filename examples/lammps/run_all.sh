#!/usr/bin/env bash
# Exports three models and runs every example of this folder, short, on N ranks (default 2), in the folder OUTPUT.
#
#   examples/lammps/run_all.sh OUTPUT [N]
#
# nvdd, lmp, mpirun and python must be on the path: activate the environment first.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
output=${1:?usage: run_all.sh OUTPUT [N]}
ranks=${2:-2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$output"
cp "$here"/in.* "$here/silica.lmp" "$here"/water.* "$here/driver.py" "$output"
cd "$output"

nvdd export sevenn:7net-0 -o 7net-0.nvdd --elements Si,O
python "$here/../random_mace.py" random.model
nvdd export mace:random.model -o mace.nvdd --elements Si,O
nvdd export lj -o lj.nvdd --option epsilon=Si:0.2,O:0.1 --option sigma=Si:2.0,O:1.5 \
  --option pair_coeffs=Si-O:1.5:1.45 --option cutoff=5 --option shift=smooth

run() {
  echo "--- $*"
  mpirun -n "$ranks" "$@" </dev/null
}

run lmp -in in.silica -var n 1 -var melt 10 -var quench 10 -var relax 5
for model in 7net-0 mace lj; do
  run lmp -in in.swap -var n 1 -var steps 10 -var model $model.nvdd
done
run lmp -in in.npt -var n 1 -var steps 10
run lmp -in in.minimize -var n 1 -var most 5
run lmp -in in.hybrid_zbl -var n 1 -var steps 10
run python driver.py 7net-0.nvdd
