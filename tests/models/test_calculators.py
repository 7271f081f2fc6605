"""A package's own calculator is recognised without importing the package; what changes its physics is another one."""

from __future__ import annotations

import ase.calculators.lj

from nvdd.models.calculators import is_own_calculator

LJ = ("ase.calculators.lj", "LennardJones")


class Renamed(ase.calculators.lj.LennardJones):
    """A subclass with the same physics."""


class Doubled(ase.calculators.lj.LennardJones):
    """One of its own."""

    def calculate(self, *args, **kwargs):
        super().calculate(*args, **kwargs)
        self.results["energy"] *= 2


def test_which_are_theirs():
    assert is_own_calculator(ase.calculators.lj.LennardJones(), *LJ) and is_own_calculator(Renamed(), *LJ)
    assert not is_own_calculator(Doubled(), *LJ) and not is_own_calculator(object(), *LJ)
    assert is_own_calculator(Doubled(), *LJ, methods=("get_stress",))


def test_what_is_not_imported_has_made_nothing():
    assert not is_own_calculator(object(), "a_package_that_nobody_has", "Calculator")
    assert not is_own_calculator(object(), LJ[0], "NoSuchClass")
