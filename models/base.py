"""The contract of a model wrapper: a single-process ``nn.Module`` that says what it needs."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from nvdd.data import AtomicData, Batch
from nvdd.model_config import EdgeLayout, ModelConfig, NeighborConfig, NeighborListFormat
from nvdd.specs import MLIPSpec

__all__ = [
    "AtomicData",
    "BaseModelMixin",
    "Batch",
    "EdgeLayout",
    "ModelConfig",
    "ModelOutputs",
    "NeighborConfig",
    "NeighborListFormat",
]


class ModelOutputs(OrderedDict):
    """Named outputs of a forward: ``energies`` (n_atoms,) eV, ``energy`` (n_systems,) eV, ..."""


class BaseModelMixin:
    """What a wrapper has beside ``torch.nn.Module``::

        class MyWrapper(torch.nn.Module, BaseModelMixin):
            def __init__(self, model):
                super().__init__()
                self.model = model
                self.model_config = ModelConfig(neighbor_config=NeighborConfig(cutoff=5.0))

            def forward(self, data: Batch) -> ModelOutputs:
                return self.adapt_output(self.model(**self.adapt_input(data)), data)

            def distribution_spec(self, strategy=None):
                return SPEC_MPNN_HALO

    A wrapper should return per-atom ``energies``: the framework sums the owned ones in float64, and derives
    forces, stress and per-atom stresses from them, so ``forward`` need not.

    Attributes:
        model_config: see :class:`ModelConfig`.
        edge_layout: see :class:`EdgeLayout`; which column of the neighbour list the model takes for the sender.
    """

    model_config: ModelConfig
    edge_layout: EdgeLayout = EdgeLayout()

    def adapt_input(self, data: Batch, **kwargs: Any) -> dict[str, Any]:
        """Keyword arguments of the inner model, made from a Batch; ``kwargs`` are added to them."""
        return {"data": data, **kwargs}

    def adapt_output(self, raw: Any, data: Batch) -> ModelOutputs:
        """``raw``, which the inner model returned for ``data``, as ModelOutputs."""
        return ModelOutputs(raw)

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec | None:
        """How this model is distributed under ``strategy``; a plain attribute or property does as well."""
        return None

    def distributed_setup(self, ctx: Any) -> None:
        """Called once when the model becomes part of a distributed run; ``ctx`` is its DD context."""

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the weights; the type in which the model takes its edge vectors."""
        for tensor in self._tensors():
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.float64

    def _tensors(self):
        yield from self.parameters()
        yield from self.buffers()


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in a nested container, or None."""
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((t for t in map(first_tensor, items) if t is not None), None)
