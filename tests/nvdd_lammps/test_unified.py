"""NVDDUnified on 1 to 3 ranks, in each of its hosts (stand-ins), against the models' own calculators and one process."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import bond_models
import parity
from lammps_data import Case, evaluate, structure, wrapper
from lammps_models import Charged
from nvdd import Batch, DistributedModel
from nvdd.errors import InputError
from nvdd_lammps import NVDDUnified, hosts
from nvdd_lammps.bond_rows import LIST_MARGIN

RANKS = (1, 2, 3)
NULL = (0, 3, 7)

CASES = {
    "lj triclinic": Case("lj", "triclinic"),
    "lj tiny cell": Case("lj", "tiny cell"),  # one atom, a cell smaller than the cutoff: empty ranks
    "lj slab": Case("lj", "slab"),
    "lj pair": Case("lj", "pair"),
    "lj gas": Case("lj", "gas"),
    "lj nothing": Case("lj", "nothing"),
    "lj NULL": Case("lj", "triclinic", null=NULL),
    "lj real": Case("lj", "triclinic", options={"units": "real"}),
    "lj python": Case("lj", "triclinic", host="python", null=NULL, far=3.0),
    "lj kokkos": Case("lj", "triclinic", host="kokkos", null=NULL, far=3.0),
    "lj gas kokkos": Case("lj", "gas", host="kokkos"),
    "mace": Case("mace-zbl", "quartz unit"),
    "mace 3 layers": Case("mace-3-layers", "quartz"),
    "mace python": Case("mace-zbl", "quartz unit", host="python", far=2.0),
    "mace kokkos": Case("mace-zbl", "quartz unit", host="kokkos"),
    "positions": Case("toy:positions", "triclinic", standard=True, far=2.0),
    "positions tiny cell": Case("toy:positions", "tiny cell", standard=True),
    "direct": Case("toy:direct", "triclinic", standard=True),
    "bonds": Case("toy:bonds", "triclinic", standard=True, far=2.0),
    "bonds tiny cell": Case("toy:bonds", "tiny cell", standard=True),
    "bonds gas": Case("toy:bonds", "gas", standard=True),
    "bonds python": Case("toy:bonds", "triclinic", host="python", standard=True),
    "reverse edges": Case("toy:reverse", "triclinic", standard=True, far=2.0),
    "reverse edges tiny cell": Case("toy:reverse", "tiny cell", standard=True),
    "reverse edges gas": Case("toy:reverse", "gas", standard=True),
    "reverse edges python": Case("toy:reverse", "triclinic", host="python", standard=True),
    "charges": Case("toy:charged", "triclinic", options={"charges": np.random.default_rng(0).uniform(-1, 1, 48).tolist()}),
}  # fmt: skip
EXCHANGES = {"lj": 1, "mace-zbl": 5, "mace-3-layers": 5}  # species of senders; a fetch and a fold for each later layer


@pytest.fixture(scope="module")
def found() -> Any:
    """What all cases give, for a number of ranks."""

    @cache
    def parts(n: int) -> Any:
        try:
            return evaluate(CASES, n)
        except AssertionError as error:  # known to all tests, so that they don't try it again
            return error

    def of(n: int) -> dict[str, Any]:
        if isinstance(parts(n), AssertionError):
            raise parts(n)
        return parts(n)

    return of


@cache
def expected(name: str) -> parity.Results:
    """One process: the model's own calculator, or for toys the core on one rank."""
    case = CASES[name]
    if not case.null and not case.options and ":" not in case.model and case.structure != "nothing":
        return replace(parity.reference(case.model, case.structure), stresses=None)
    atoms = structure(case)
    if case.structure == "nothing":
        return parity.Results(0.0, np.zeros(0), np.zeros((0, 3)), np.zeros((3, 3)), None)
    atoms = atoms[[i for i in range(len(atoms)) if i not in case.null]]
    if "charges" in case.options:
        atoms.set_array("charges", np.array(case.options["charges"]))
    out = DistributedModel(wrapper(case.model))(Batch.from_atoms(atoms), {"energy", "energies", "forces", "stress"})
    factor = hosts.ENERGY_UNITS[case.options.get("units", "metal")]
    value = lambda key: factor * out[key].numpy()
    return parity.Results(float(value("energy")[0]), value("energies"), value("forces"), value("stress")[0], None)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", RANKS)
def test_same_as_one_process(found, n, name):
    case, mine, wanted = CASES[name], found(n)[name], expected(name)
    computed = np.setdiff1d(np.arange(len(mine["forces"])), case.null)
    assert not mine["forces"][list(case.null)].any()
    if case.structure == "nothing":
        assert mine["energy"] == 0.0 and len(mine["forces"]) == 0
        return
    stress = mine["virial"] / structure(case).get_volume() if wanted.stress is not None else None
    results = parity.Results(mine["energy"], mine["energies"][computed], mine["forces"][computed], stress, None)
    parity.assert_parity(results, wanted, tight=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", RANKS)
def test_exchanges(found, n, name):
    """One rank has no halo and sends nothing; a second step on the same list builds nothing."""
    case, mine = CASES[name], found(n)[name]
    assert len(set(mine["exchanges"])) == 1, "ranks must take part in the same exchanges"
    assert mine["builds"] == [1] * n
    assert not any(mine["setup"])
    if n == 1:
        assert mine["halo"] == [0] and mine["exchanges"] == [0]
    elif case.model in EXCHANGES:
        assert mine["exchanges"][0] <= EXCHANGES[case.model]


def lj(**meta: Any) -> NVDDUnified:
    return NVDDUnified(parity.wrapper("lj"), {"elements": ["Ar", "Ne"], **meta})


def test_contract():
    unified = lj()
    unified.interface = lambda: None  # can't be pickled
    again = pickle.loads(pickle.dumps(unified))
    for one in (unified, again):
        assert one.element_types == ["Ar", "Ne"]
        assert one.rcutfac == 0.5 * parity.LJ["cutoff"]
        assert (one.ndescriptors, one.nparams) == (1, 1)
        one.compute_descriptors(None)
        one.compute_gradients(None)
    assert again.interface is None
    assert NVDDUnified(parity.wrapper("mace")).element_types == ["O", "Si"]


def test_refused_when_loaded():
    model = Charged()
    with pytest.raises(InputError, match="takes any element"):
        NVDDUnified(model)
    with pytest.raises(InputError, match="LennardJonesModelWrapper does not know Si; it knows Ne, Ar"):
        NVDDUnified(parity.wrapper("lj"), {"elements": ["Si", "Ar"]})
    model.model_config = replace(model.model_config, system_inputs=frozenset({"spin"}))
    with pytest.raises(InputError, match="reads spin, which LAMMPS does not have"):
        NVDDUnified(model, {"elements": ["Ar"]})
    model.model_config = replace(model.model_config, optional_inputs=frozenset({"spin"}))
    assert NVDDUnified(model, {"elements": ["Ar"]}).element_types == ["Ar"]
    with pytest.raises(ValueError, match=r"optional_inputs \['q'\] are not among node_inputs and system_inputs"):
        replace(model.model_config, optional_inputs=frozenset({"q"}))


def test_pairs_longer_than_the_cutoff():
    """Where the longest edges have reverses, LAMMPS is asked for pairs before they are edges; else for edges alone."""
    reach = lambda model: 2 * NVDDUnified(model, {"elements": ["Ar"]}).rcutfac
    assert reach(bond_models.ReverseEdges()) == bond_models.CUTOFF + LIST_MARGIN
    assert reach(bond_models.ShortBonds()) == bond_models.CUTOFF > bond_models.SHORT + LIST_MARGIN
