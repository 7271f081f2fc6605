"""SevenNet with fused convolutions over ranks: equal to the model with e3nn's, whose wrapper test_sevenn.py compares."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch

import cueq
import parity
from builders import evaluate, quartz
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models import sevenn_fused
from nvdd.models.sevenn import SevenNetWrapper
from nvdd.models.sevenn_configuration import configuration, rebuild

pytest.importorskip("sevenn")
pytest.importorskip("cuequivariance_torch", reason="needs cuequivariance-torch; ./dev env installs it")

PLAIN, FUSED = parity.SMALL_SEVENNET


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(1, {}), (2, {}), (2, {"halo_correction": True}), (3, {"strategy": "graph"}), (4, {"balance": "rcb"})],
)
def test_equals_the_plain_model(ranks, world_size, options):
    parts = ranks.run(world_size, parity.on_rank, FUSED, "quartz slab", dict(options))
    found = parity.assemble(parts, len(parity.structure("quartz slab")))
    parity.assert_parity(found, parity.reference(PLAIN, "quartz slab"), tight=True)


def test_exchanges_are_those_of_the_plain_model(ranks):
    """A fetch and its adjoint in each layer but the first, whose rows are inputs, and the forces."""
    fused, plain = (ranks.run(2, parity.on_rank, model, "quartz slab", {})[0]["exchanges"] for model in (FUSED, PLAIN))
    assert fused == plain > 0


def test_atom_without_neighbours():
    alone = quartz()[:1]
    alone.set_cell([30, 30, 30])
    found = evaluate(parity.wrapper(FUSED), alone)
    np.testing.assert_allclose(found.energy, evaluate(parity.wrapper(PLAIN), alone).energy, rtol=1e-13)
    assert not found.forces.any()


def test_pickled_and_described():
    """A file has weights that either kind takes; which convolutions there are is for the machine to say."""
    fused = parity.wrapper(FUSED)
    forces = evaluate(fused, quartz()).forces
    np.testing.assert_array_equal(evaluate(pickle.loads(pickle.dumps(fused)), quartz()).forces, forces)
    described = json.loads(json.dumps(configuration(fused)))
    assert described["kernels"] == "enable_cueq"
    for there in (False, True):
        if there:
            with cueq.sevennet_kernels_in_plain_torch():
                rebuilt = rebuild(described, torch.float64)
        else:
            rebuilt = rebuild(described, torch.float64)
        assert sevenn_fused.is_fused(rebuilt.model) is there
        assert rebuilt.load_state_dict(fused.state_dict())
        np.testing.assert_allclose(evaluate(rebuilt, quartz()).forces, forces, rtol=0, atol=1e-14)


def test_without_a_gpu_the_option_changes_nothing():
    made = SevenNetWrapper.from_checkpoint("7net-0", enable_cueq=True)
    assert sevenn_fused.is_fused(made.model) is torch.cuda.is_available()
    assert made.kernels == "enable_cueq"


def test_kernels_for_gpus_on_a_cpu():
    """The block of another kind of kernel, which would fail in its own words."""
    wrapper = copy.deepcopy(parity.wrapper(FUSED))
    block = next(b for b in wrapper.model.children() if type(b).__name__.endswith("FusedConvolution"))
    block.convolution = torch.nn.Identity()
    with pytest.raises(InputError, match="has fused convolutions, which run on NVIDIA GPUs, and it is on cpu"):
        evaluate(wrapper, quartz())


def test_wishes_that_can_not_be():
    with pytest.raises(InputError, match="enable_cueq and enable_oeq: a SevenNet model has one kind"):
        SevenNetWrapper.from_checkpoint("7net-0", enable_cueq=True, enable_oeq=True)
    with pytest.raises(InputError, match="enable_x: SevenNet has no such convolutions"):
        sevenn_fused.one_of(enable_x=True)
    with pytest.raises(MissingDependencyError, match="enable_flash needs flashTP_e3nn"):
        SevenNetWrapper.from_checkpoint("7net-0", enable_flash=True)
