"""Names of sums of models, options of their blocks, wires as text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import parity
from nvdd import InputError, MissingDependencyError
from nvdd.models import load
from nvdd.models.composed import normal_options, parts, read_wires
from nvdd.models.registry import check

LJ = {"epsilon": 0.0104, "sigma": 3.4}
NAMES = ["mace:x.model", "lj", "lj"]


def test_names():
    assert parts("mace:x + dftd3:pbe  +  py:a.b:c") == ["mace:x", "dftd3:pbe", "py:a.b:c"]
    assert parts("mace:my+file.model") == ["mace:my+file.model"]
    assert parts("mace:runs/a + b/my.model") == ["mace:runs/a + b/my.model"]
    assert parts("lj + mace:a + b.model + py:m:f") == ["lj", "mace:a + b.model", "py:m:f"]


@pytest.mark.parametrize(
    "options",
    (
        [{"cutoff": 5.0}, {"cutoff": 8.0, **LJ}],
        {"0.cutoff": 5.0, "1.cutoff": 8.0, "1.epsilon": 0.0104, "1.sigma": 3.4},
        {"block_options": [{"cutoff": 5.0}, {"cutoff": 8.0, **LJ}]},
    ),
)
def test_options_of_blocks(options):
    model = load("lj + lj", **normal_options("lj + lj", options))
    assert [b.cutoff for b in model.composed_of] == [5.0, 8.0] and model.composed_of[1].options["sigma"] == 3.4


def test_a_family_names_its_block():
    options = normal_options("mace:x.model + lj", {"lj.cutoff": 5.0, "head": "a", "sigma": 2.0})
    assert options == {"block_options": [{"head": "a"}, {"cutoff": 5.0, "sigma": 2.0}]}
    assert normal_options("lj", LJ) == LJ and normal_options("lj", None) == {}


def test_type_of_all_blocks():
    model = load("lj + lj", dtype=torch.float32)
    assert [b.dtype for b in model.composed_of] == [torch.float32, torch.float32]


@pytest.mark.parametrize(
    "given,expected",
    (
        ("charges=mace.charges", {"charges": (0, "charges")}),
        ("charges=0.q.fixed, spins=own", {"charges": (0, "q", "fixed"), "spins": None}),
        ({"charges": "2.charges"}, {"charges": (2, "charges")}),
        ({"charges": (1, "q")}, {"charges": (1, "q")}),
        ({"charges": None}, {"charges": None}),
        (None, {}),
    ),
)
def test_wires(given, expected):
    assert read_wires(NAMES, 1, given) == expected


@pytest.mark.parametrize(
    "given,message",
    (
        ("charges", "write INPUT=BLOCK.OUTPUT, such as charges=aimnet2.charges"),
        ("charges=", "write INPUT=BLOCK.OUTPUT"),
        ("charges=mace", "'mace' is not BLOCK.OUTPUT"),
        ("charges=0.q.frozen", "is not BLOCK.OUTPUT, BLOCK.OUTPUT.fixed or own"),
        ("charges=lj.q", r"2 blocks are lj: use a number; the blocks are 0 \(mace:x.model\), 1 \(lj\), 2 \(lj\)"),
        ("charges=7.q", "there is no block 7"),
        (("charges",), "must be a mapping of inputs"),
    ),
)
def test_wires_that_cannot_be_read(given, message):
    with pytest.raises(InputError, match=r"wires of block 1 \(lj\).*" + message):
        read_wires(NAMES, 1, given)


@pytest.mark.parametrize(
    "model,options,error,message",
    (
        ("lj + nope", {}, InputError, "unknown model family 'nope'"),
        ("lj +  + lj", {}, InputError, "with a model on each side"),
        ("lj + lj", {"cutoff": 3}, InputError, r"whose option is 'cutoff'\? Write the block before it: 0.cutoff \(lj\), 1.cutoff"),
        ("lj + mace:x", {"head": "a", "rate": 1}, InputError, r"whose option is 'rate'\?"),
        ("lj + lj", [{}], InputError, "has 2 blocks, but there are options for 1"),
        ("lj + lj", [{}, 3], InputError, "options of block 1 .* must be a mapping or None, got 3"),
        ("lj + lj", {"0.head": 3}, InputError, "lj: no option head"),
        ("lj + lj", {"lj.cutoff": 3}, InputError, "option 'lj.cutoff': 2 blocks are lj: use a number"),
        ("lj + lj", {"nequip.cutoff": 3}, InputError, "there is no block nequip"),
        ("lj + lj", {"block_options": [{}, {}], "0.cutoff": 3.0}, InputError, "the options 0.cutoff stand beside block_options"),
        ("lj + lj", {"block_options": [{}, {}], "nonsense": 1}, InputError, "the options nonsense stand beside block_options"),
        ("mace:x + lj", {"lj.cutoff": 5.0, "1.cutoff": 6.0}, InputError, r"option '1.cutoff': 'cutoff' of block 1 \(lj\) is given twice"),
        ("lj + mace:x", {"1.head": "a", "head": "b"}, InputError, "option 'head': 'head' of block 1 .* is given twice"),
        ("lj + lj", 3, InputError, "must be a mapping, or a list of one for each block, got 3"),
        ("lj + lj", "cutoff=3", InputError, "must be a mapping, or a list of one for each block, got 'cutoff=3'"),
        ("lj + lj", {0: {}}, InputError, "option 0: the name of an option is text"),
        ("lj + lj", [{}, {3: 4}], InputError, "must have names that are texts"),
        ("lj + lj", {"1.wires": {"charges": 0}}, InputError, "0 is not .block, output."),
        ("lj + ./x.model", {}, InputError, "unknown model family"),
        ("lj", [{}], InputError, "is one model: its options are a mapping"),
    ),
)
def test_refused(model, options, error, message):
    with pytest.raises(error, match=message):
        check(model, normal_options(model, options))


def test_a_missing_package_is_named_before_anything_is_built(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="needs the package 'sevenn'"):
        check("lj + sevenn:7net-0", normal_options("lj + sevenn:7net-0", None))


def test_the_sum_is_the_sum_of_its_parts():
    from nvdd_ase import NVDDCalculator

    atoms, results = parity.structure("triclinic").copy(), []
    small, large = {"cutoff": 4.4, **LJ}, {"cutoff": 8.0, "sigma": 3.0, "epsilon": 0.02}
    for model, options in (("lj", small), ("lj", large), ("lj + lj", [small, large])):
        atoms.calc = NVDDCalculator(model, model_options=options)
        results.append((atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress(), atoms.get_stresses()))
    for a, b, both in zip(*results, strict=True):
        assert np.abs(a + b - both).max() <= 1e-12 * np.abs(both).max()
