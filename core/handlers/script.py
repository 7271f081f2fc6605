"""Scripted modules and functions (``torch.jit``): outside dispatch. They get plain tensors and give plain tensors."""

from __future__ import annotations

from typing import Any

from nvdd.dispatch import Call, register
from nvdd.roles import Role


def _is_scripted(call: Call) -> bool:
    return type(call.func).__name__ in ("ScriptMethod", "ScriptFunction")


def _name(function: Any) -> str:
    """A function's name and where it is defined, as far as torch has kept them."""
    source = getattr(function, "_torchdynamo_inline", None)
    if source is None:
        return f"the scripted {getattr(function, 'name', None) or 'code'}"
    code = getattr(source, "__code__", None)
    site = f", defined at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    return f"the scripted function {source.__module__}.{source.__qualname__}{site},"


@register("*", when="scripted code", does="plain tensors in, plain tensors out", predicate=_is_scripted)
def scripted(call: Call):
    # receivers are owned, so what is summed over them is complete, unless halo rows must be refreshed after it
    hidden = call.has(Role.SENDER, Role.EDGE_INDEX, Role.SYSTEM_INDEX, Role.ANCHOR)
    if hidden or (call.has(Role.RECEIVER) and call.meta.corrects):
        raise call.refuse(
            f"{_name(call.func)} gets an index that stands for remote atoms or for systems (or stand-ins for positions), and "
            "what scripted code does with it can't be seen",
            "Use the eager module or function (not torch.jit.script), a JitAdapter for it in the model's spec, or gather and "
            "scatter outside it",
        )
    return call.run()
