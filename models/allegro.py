"""Allegro: strictly local models of the nequip framework, which `nvdd.models.nequip` wraps as well."""

from __future__ import annotations

from typing import Any

import torch

from nvdd.errors import InputError
from nvdd.models import nequip
from nvdd.models.nequip_files import ALLEGRO_INSTALL
from nvdd.models.registry import ModelFamily


def build(checkpoint: str | None, *, dtype: torch.dtype | None = None, **options: Any) -> nequip.NequIPWrapper:
    """The wrapper of a file; raises InputError if its model is not strictly local."""
    wrapper = nequip.build(checkpoint, dtype=dtype, **options)
    if not wrapper.strictly_local:
        raise InputError(f"{checkpoint} is no Allegro model: it reads features of neighbours; take nequip:{checkpoint}")
    return wrapper


FAMILY = ModelFamily(
    name="allegro",
    description="Allegro, strictly local equivariant models (packages and checkpoints of nequip with nequip-allegro)",
    build=build,
    options=nequip.OPTIONS,
    package="allegro",
    install=ALLEGRO_INSTALL,
    licence="package MIT; weights as their authors state, on nequip.net for the models there",
    configuration=nequip.configuration,
    rebuild=nequip.rebuild,
)
