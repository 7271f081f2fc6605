"""Adapters and context of whole models in one process: two at once, exceptions, autograd's own thread."""

from __future__ import annotations

import pytest
import torch

import custom_ops
import verb_models
from nvdd import (
    Batch,
    DistributedModel,
    DistributedOpError,
    JitAdapter,
    LocalStoragePolicy,
    ModelOutputs,
    PythonAdapter,
    current_dd_context,
)
from nvdd.context import DDContext, enter


class Scripted(verb_models.Base):
    """Calls a free scripted function with an edge index."""

    def forward(self, data):
        h = self.species(data.atomic_numbers)
        message = custom_ops.scripted_gather(h, data.senders) * self.waves(data)
        return ModelOutputs(energies=self.readout(torch.zeros_like(h).index_add(0, data.receivers, message)))


class WithSetup(Scripted):
    """Makes its adapter when it becomes part of a distributed run."""

    def distributed_setup(self, ctx):
        self.seen = ctx.spec
        ctx.adapters.add(JitAdapter("custom_ops", "scripted_gather"))


class Failing(verb_models.OpaqueBlocks):
    def readout(self, h):
        raise ZeroDivisionError


class Nested(verb_models.OpaqueBlocks):
    """Evaluates another distributed model inside its forward."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "inner", DistributedModel(verb_models.OpaqueBlocks()))

    def features(self, data):
        mine = current_dd_context()
        self.inner_energy = self.inner(Batch.from_atoms(verb_models.structure()), {"energy"})["energy"]
        assert current_dd_context() is mine
        return super().features(data)


def batch():
    return Batch.from_atoms(verb_models.structure())


def test_a_scripted_function_with_an_index_is_named():
    with pytest.raises(
        DistributedOpError, match=r"the scripted custom_ops.scripted_gather \(defined at .*custom_ops.py:"
    ):
        DistributedModel(Scripted())(batch())
    assert type(torch.jit.ScriptFunction.__call__).__name__ == "instancemethod", "torch is as it was"


def test_adapters_from_distributed_setup():
    model = DistributedModel(WithSetup())
    out = model(batch(), {"energy", "forces"})
    assert {s.target: s.calls for s in model.adapters.statuses()}["custom_ops.scripted_gather"] == 1
    spec = Scripted().distribution_spec().with_adapters(JitAdapter("custom_ops", "scripted_gather"))
    again = DistributedModel(Scripted(), spec=spec)(batch(), {"energy", "forces"})
    assert torch.equal(out["energy"], again["energy"])


def test_an_exception_in_the_model_restores():
    forward = verb_models.Opaque.forward
    with pytest.raises(ZeroDivisionError):
        DistributedModel(Failing())(batch())
    assert verb_models.Opaque.forward is forward and current_dd_context() is None


def test_a_model_inside_a_model():
    wrapper = Nested()
    model = DistributedModel(wrapper)
    energy = model(batch(), {"energy"})["energy"]
    assert torch.equal(energy, wrapper.inner_energy)
    calls = lambda m: {s.target: s.calls for s in m.adapters.statuses()}["verb_models.Opaque.forward"]
    assert calls(model) == calls(wrapper.inner) == 2


def test_an_adapter_without_replacement_stops_the_model():
    spec = verb_models.OpaqueBlocks().distribution_spec().with_adapters(PythonAdapter("custom_ops", "scripted_gather"))
    with pytest.raises(ValueError, match="has no replacement"):
        DistributedModel(verb_models.OpaqueBlocks(), spec=spec)(batch())


@pytest.mark.parametrize("name", ["OpaqueBlocks", "WholeTable"])
def test_nothing_crosses_under_a_local_policy(name):
    wrapper = verb_models.MODELS[name]()
    wrapper.policy = LocalStoragePolicy()
    with pytest.raises(DistributedOpError, match="LocalStoragePolicy lets nothing cross ranks"):
        DistributedModel(wrapper)(batch())


def test_context_in_backward_on_another_thread():
    """As on a GPU, where autograd runs on threads that have entered no forward."""
    from concurrent.futures import ThreadPoolExecutor

    model = DistributedModel(verb_models.SystemCharges())
    contexts = []

    class Mine(verb_models.SystemCharges):
        def features(self, data):
            contexts.append(current_dd_context())
            return super().features(data)

    DistributedModel(Mine())(batch())
    one = DDContext(contexts[0].meta, "one")

    def backward_elsewhere():
        seen = []
        x = torch.ones(1, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: seen.append(_attempt()))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: y.sum().backward()).result(30)
        return seen[0]

    def _attempt():
        try:
            return current_dd_context()
        except DistributedOpError as error:
            return str(error)

    assert backward_elsewhere() is None
    with enter(one):
        assert backward_elsewhere() is one
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(current_dd_context).result(30) is None, "no backward: another thread's business"
        with enter(DDContext(contexts[0].meta, "two")):
            assert "2 models of this process run at once (one, two)" in backward_elsewhere()
    assert model.adapters.list_active() == []
