"""Model families: each a wrapper beside its spec. `nvdd.models.load` builds one from its name."""

from __future__ import annotations

import importlib
from typing import Any

from nvdd.models.base import BaseModelMixin, ModelOutputs
from nvdd.models.registry import ModelFamily, families, load

# wrapper -> its module, which is loaded when the wrapper is first used
_WRAPPERS = {
    "AIMNet2Wrapper": "nvdd.models.aimnet2",
    "DFTD3ModelWrapper": "nvdd.models.dftd3",
    "EwaldModelWrapper": "nvdd.models.ewald",
    "PMEModelWrapper": "nvdd.models.pme",
    "PipelineModelWrapper": "nvdd.models.pipeline",
}

__all__ = ["BaseModelMixin", "ModelFamily", "ModelOutputs", "families", "load", *_WRAPPERS]


def __getattr__(name: str) -> Any:
    if name in _WRAPPERS:
        value = getattr(importlib.import_module(_WRAPPERS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'nvdd.models' has no attribute {name!r}")
