"""Which modules and calculators of orb-models nvdd takes, and which inputs they read."""

from __future__ import annotations

import copy
from typing import Any

import torch

from nvdd.errors import InputError
from nvdd.models.calculators import is_own_calculator
from nvdd.models.orb_files import import_orb

_HEADS = ("energy", "forces", "stress", "confidence")


def fixed_inputs(model: Any, **given: Any) -> dict[str, float | None]:
    """Charge and spin as given, of a model that reads them; else nothing."""
    if model.model.conditioner is not None:
        try:
            return {name: None if value is None else float(value) for name, value in given.items()}
        except (TypeError, ValueError) as error:
            raise InputError(f"orb: charge and spin must be numbers: {error}") from None
    for name, value in given.items():
        if value is not None:
            raise InputError(f"{name}={value!r} was given, but this Orb model does not read charge and spin")
    return {}


def check(model: Any) -> bool:
    """Whether the model is conservative; raises InputError for one that can't be used."""
    import_orb()
    from orb_models.forcefield.conservative_regressor import ConservativeForcefieldRegressor
    from orb_models.forcefield.direct_regressor import DirectForcefieldRegressor
    from orb_models.forcefield.nn_util import ChargeSpinConditioner

    if not isinstance(model, (ConservativeForcefieldRegressor, DirectForcefieldRegressor)):
        name = f"{type(model).__module__}.{type(model).__name__}"
        raise InputError(
            f"nvdd's Orb wrapper needs a ConservativeForcefieldRegressor or DirectForcefieldRegressor of orb-models, not a {name}"
        )
    if model.is_compiled():
        raise InputError("this Orb model is compiled, which hides where ranks exchange features; load it with compile=False")
    if model.system_config is None:
        raise InputError("this Orb model does not say its radius and number of neighbours; give it a system_config")
    conservative = isinstance(model, ConservativeForcefieldRegressor)
    wanted = ("energy", "confidence") if conservative else _HEADS
    if unknown := sorted(set(model.heads) - set(wanted)):
        raise InputError(f"this Orb model has heads {unknown}, of which nvdd doesn't know what they mean over ranks")
    if missing := sorted({"energy", *(() if conservative else ("forces",))} - set(model.heads)):
        raise InputError(f"this Orb model has no head for {missing[0]}")
    if not isinstance(model.model.conditioner, (ChargeSpinConditioner, type(None))):
        raise InputError(f"this Orb model is conditioned by a {type(model.model.conditioner).__name__}, which nvdd doesn't know")
    return conservative


def module_of_calculator(calc: Any) -> torch.nn.Module | None:
    """A copy of the model of an ``ORBCalculator``; None for another one."""
    if not is_own_calculator(calc, "orb_models.forcefield.calculator", "ORBCalculator"):
        return None
    conservative = check(calc.model)
    if bool(calc.conservative) != conservative:
        raise InputError("this ORBCalculator takes no derivatives of a conservative model; use conservative=True")
    model = copy.deepcopy(calc.model)
    model._system_config = copy.copy(calc.system_config)
    return model
