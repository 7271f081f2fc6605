"""A model as a description in JSON plus weights: how a family or a user's module makes it again elsewhere."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import torch

from nvdd.errors import InputError
from nvdd.models import composed, registry
from nvdd.models.base import BaseModelMixin

PIPELINE = "pipeline"  # stands for the family of a sum of models
_PICKLE = "or export it with allow_pickle (--allow-pickle), which puts the module itself into the file"


def describe(model: str, wrapper: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What ``rebuild`` needs to make a wrapper into which ``wrapper.state_dict()`` fits.

    Args:
        model: the string from which ``nvdd.models.load(model, **options)`` made ``wrapper``.

    Raises:
        InputError: the model can't be described; the message has the reason.
    """
    if composed.is_composed(model):
        return _describe_sum(model, wrapper, options)
    family, _, path = model.partition(":")
    if family == "py":
        module, _, attribute = path.partition(":")
        _declared_wrapper(model)
        return {"module": module, "attribute": attribute, "options": options}
    entry = registry.families()[family]
    if entry.configuration is None or entry.rebuild is None:
        raise InputError(
            f"the family {family!r} does not say how its models are rebuilt from a configuration "
            f"(ModelFamily.configuration and rebuild); add that, {_PICKLE}"
        )
    return entry.configuration(wrapper)


def _describe_sum(model: str, wrapper: Any, options: dict[str, Any]) -> dict[str, Any]:
    blocks = []
    given = composed.normal_options(model, options)[composed.BLOCKS]
    for part, block, mine in zip(composed.parts(model), wrapper.composed_of, given, strict=True):
        mine = {key: value for key, value in mine.items() if key != composed.WIRES}
        dtype = str(block.dtype).removeprefix("torch.")
        described = describe(part, block, mine)
        blocks.append({"family": part.partition(":")[0], "dtype": dtype, "configuration": described})
    wires = [[w.target, w.input, w.source, w.output, *(["fixed"] if w.fixed else [])] for w in wrapper.wires]
    return {"blocks": blocks, "wires": wires}


def _rebuild_sum(configuration: dict[str, Any]) -> Any:
    from nvdd.models.pipeline import PipelineModelWrapper

    blocks = [rebuild(b["family"], b["configuration"], getattr(torch, b["dtype"])) for b in configuration["blocks"]]
    # an input that has no wire here had none before
    configs = [block.model_config for block in blocks]
    wires: dict[Any, Any] = {(k, name): None for k, c in enumerate(configs) for name in c.node_inputs | c.system_inputs}
    wires |= {(target, name): tuple(source) for target, name, *source in configuration["wires"]}
    return PipelineModelWrapper(blocks, wires)


def rebuild(family: str, configuration: dict[str, Any], dtype: torch.dtype) -> Any:
    """A wrapper on the CPU, for inference, whose weights are not loaded yet.

    No code of the file runs: a family is nvdd's or an installed package's, and a module of one's own is imported from
    the Python path, where its attribute must say of itself that it makes a wrapper.

    Raises:
        InputError: an unknown family, a module that can't be imported, or whose attribute makes no wrapper.
        MissingDependencyError: the family's package is not installed.
    """
    if family == PIPELINE:
        return _rebuild_sum(configuration).eval().requires_grad_(False)
    if family == "py":
        model = f"py:{configuration['module']}:{configuration['attribute']}"
        _declared_wrapper(model)
        wrapper = registry.load(model, dtype=dtype, **configuration["options"])
    else:
        registry.check(family)
        entry = registry.families()[family]
        if entry.rebuild is None:
            raise InputError(f"the family {family!r} of this nvdd can't rebuild a model from a file; update nvdd")
        wrapper = entry.rebuild(configuration, dtype)
    return wrapper.to(dtype=dtype).eval().requires_grad_(False)


def _declared_wrapper(model: str) -> None:
    """Raises unless the attribute says that it is or makes a wrapper: a file must not call any function there is."""
    value = registry.user_attribute(model)
    if isinstance(value, BaseModelMixin):
        return
    made = value if isinstance(value, type) else _returned(value)
    if not (isinstance(made, type) and issubclass(made, BaseModelMixin)):
        raise InputError(
            f"{model!r} does not say that it makes a wrapper, and a file may name only what does: let it be a class "
            f"with nvdd.BaseModelMixin, or a function whose return is annotated with one, {_PICKLE}"
        )


def _returned(function: Any) -> Any:
    try:
        return typing.get_type_hints(inspect.unwrap(function)).get("return")
    except (NameError, TypeError, AttributeError):  # a name that only type checkers import, or no function
        return None
