"""MACE with cuEquivariance's parts, fused convolutions too, over ranks: equal to MACECalculator with e3nn's."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch

import cueq
import parity
from builders import evaluate, quartz, random_mace
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models import mace_cueq
from nvdd.models.mace import MACEWrapper
from nvdd.models.mace_configuration import configuration, rebuild

pytest.importorskip("mace")
pytest.importorskip("cuequivariance_torch", reason="needs cuequivariance-torch; ./dev env installs it")


# the most telling in CI, all with --run-slow
RUNS = [(1, {}), (2, {}), (3, {}), (2, {"strategy": "graph"})]
IN_CI = [("mace-cueq", *RUNS[1]), ("mace-cueq-fused", *RUNS[1]), ("mace-cueq-fused", *RUNS[3])]
REST = [(model, *run) for model in parity.CUEQ for run in RUNS if (model, *run) not in IN_CI]


@pytest.mark.parametrize(
    ("model", "world_size", "options"), [*IN_CI, *(pytest.param(*run, marks=pytest.mark.slow) for run in REST)]
)
def test_equals_calculator(ranks, model, world_size, options):
    parts = ranks.run(world_size, parity.on_rank, model, "quartz slab", options)
    found = parity.assemble(parts, len(parity.structure("quartz slab")))
    parity.assert_parity(found, parity.reference("mace", "quartz slab"), tight=True)


def test_fused_exchanges_as_the_plain_model(ranks):
    """Two fetches, their adjoints and the forces."""
    fused, plain = (
        ranks.run(2, parity.on_rank, model, "quartz slab", {})[0]["exchanges"] for model in ("mace-cueq-fused", "mace")
    )
    assert fused == plain > 0


def test_fused_padded_rows(ranks):
    parts = ranks.run(2, parity.on_rank, "mace-cueq-fused", "quartz slab", {"halo_correction": True})
    found = parity.assemble(parts, len(parity.structure("quartz slab")))
    parity.assert_parity(found, parity.reference("mace", "quartz slab"), tight=True)


def test_pickled_and_described():
    fused = cueq.wrapper(fused=True)
    with pytest.raises(MissingDependencyError, match="fused kernels, which are missing here"):
        pickle.loads(pickle.dumps(fused))
    with cueq.kernels_in_plain_torch():
        again = pickle.loads(pickle.dumps(fused))
        assert mace_cueq.is_fused(again.model) and "forward" in vars(again.model.interactions[1].conv_tp)
        described = json.loads(json.dumps(configuration(fused)))
        assert described["enable_cueq"]
    rebuilt = rebuild(described, torch.float64)  # as the machine has it: here without kernels
    assert not mace_cueq.is_fused(rebuilt.model)
    assert rebuilt.model.load_state_dict(fused.model.state_dict())
    np.testing.assert_allclose(evaluate(rebuilt, quartz()).forces, evaluate(fused, quartz()).forces, rtol=0, atol=1e-13)


def test_from_file(tmp_path):
    torch.save(random_mace(), tmp_path / "x.model")
    made = MACEWrapper.from_checkpoint(tmp_path / "x.model", enable_cueq=True)
    assert type(made.model.interactions[0].linear_up).__module__.startswith("cuequivariance_torch")
    with pytest.raises(InputError, match="cuEquivariance's parts already"):
        mace_cueq.convert(made.model)


def test_other_fused_convolutions_are_refused():
    module = copy.deepcopy(random_mace())
    module.interactions[1].conv_fusion = True
    with pytest.raises(InputError, match="OpenEquivariance"):
        MACEWrapper(module)


def test_sums_over_senders_are_refused(ranks):
    messages = ranks.run(2, sums_over_senders)
    assert all("sums over senders is not distributed" in message for message in messages)


def sums_over_senders(comm) -> str:
    """What is said of a convolution whose receivers and senders are exchanged."""
    from nvdd import Batch, DistributedModel, DomainConfig

    made = parity.wrapper("mace-cueq-fused")
    with cueq.kernels_in_plain_torch():
        wrapper = copy.deepcopy(made)
    for block in wrapper.model.interactions:
        theirs = block.conv_tp.forward
        block.conv_tp.forward = lambda h, y, w, index, theirs=theirs: theirs(h, y, w, (index[1], index[0]))
    with pytest.raises(InputError) as caught:
        DistributedModel(wrapper, DomainConfig(mesh=comm))(Batch.from_atoms(quartz(repeat=(2, 1, 1))))
    return str(caught.value)
