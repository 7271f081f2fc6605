"""NequIP over ranks, in ASE and in LAMMPS, against NequIPCalculator; files, and what is refused."""

from __future__ import annotations

import families

families.require("nequip", "nequip")

test_parity = families.parity_test("nequip")
test_parity_zbl = families.parity_test("nequip-zbl", ranks=(3,))
test_parity_float32 = families.parity_test("nequip-float32", ranks=(2,))
test_envelope = families.envelope_test("nequip")
test_envelope_zbl = families.envelope_test("nequip-zbl")
test_stress = families.stress_test("nequip")
test_ase = families.ase_test("nequip")
test_lammps = families.lammps_test("nequip")
