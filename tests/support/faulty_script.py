"""An ordinary script with a planted fault: ``faulty_script.py FAULT PHASE RANK CALL [MODEL [DEVICE [RANKS]]]``."""

import sys
import time

from ase.build import bulk

from nvdd_ase import NVDDCalculator

fault, phase, rank, call, model, device, ranks = (
    [*sys.argv[1:], "Faulty", "cpu", "0"][:7] if len(sys.argv) == 5 else sys.argv[1:8]
)
atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat(2)
atoms.rattle(0.1, seed=1)
options = {"fault": fault, "phase": phase, "rank": int(rank), "call": int(call)}
atoms.calc = NVDDCalculator(
    f"py:faulty:{model}", model_options=options, device=device, ranks=int(ranks) or None, skin=0.2, timeout=15.0
)
start = time.monotonic()
try:
    for _ in range(4):
        start = time.monotonic()
        atoms.get_forces()
        atoms.rattle(0.2, seed=2)
except Exception as error:
    print(f"after {time.monotonic() - start:.2f} s: {type(error).__name__}: {error}", flush=True)
    raise
print("reached the end")
