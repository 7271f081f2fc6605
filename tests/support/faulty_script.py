"""An ordinary script with a planted fault, for launchers: ``faulty_script.py FAULT PHASE RANK CALL``."""

import sys

from ase.build import bulk

from nvdd_ase import NVDDCalculator

fault, phase, rank, call = sys.argv[1:]
atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat(2)
atoms.rattle(0.1, seed=1)
options = {"fault": fault, "phase": phase, "rank": int(rank), "call": int(call)}
atoms.calc = NVDDCalculator("py:faulty:Faulty", model_options=options, device="cpu", skin=0.2, timeout=15.0)
for _ in range(4):
    atoms.get_forces()
    atoms.rattle(0.2, seed=2)
print("reached the end")
