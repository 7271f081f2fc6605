"""Scripted modules and functions (``torch.jit``): outside dispatch. They get plain tensors and give plain tensors."""

from __future__ import annotations

from typing import Any

from nvdd.dispatch import Call, register
from nvdd.roles import Role


def is_scripted_function(function: Any) -> bool:
    """Whether torch.jit made it: a function, or a method of a module."""
    return type(function).__name__ in ("ScriptMethod", "ScriptFunction")


def _is_scripted(call: Call) -> bool:
    return is_scripted_function(call.func)


def name_of(function: Any) -> str:
    """A scripted function's name, as far as torch has kept it."""
    source = getattr(function, "_torchdynamo_inline", None)
    if source is not None:
        return f"{source.__module__}.{source.__qualname__}"
    name = getattr(function, "qualified_name", None) or getattr(function, "name", "code")  # of a method: "forward"
    return name.removeprefix("__torch__.")


def _site(function: Any) -> str:
    code = getattr(getattr(function, "_torchdynamo_inline", None), "__code__", None)
    return f" (defined at {code.co_filename}:{code.co_firstlineno})" if code is not None else ""


@register("*", when="scripted code", does="plain tensors in, plain tensors out", predicate=_is_scripted)
def scripted(call: Call):
    # receivers are owned, so what is summed over them is complete, unless halo rows must be refreshed after it
    hidden = call.has(Role.SENDER, Role.EDGE_INDEX, Role.SYSTEM_INDEX, Role.ANCHOR)
    if hidden or (call.has(Role.RECEIVER) and call.meta.corrects):
        call.name = name_of(call.func)
        raise call.refuse(
            f"the scripted {call.name}{_site(call.func)} gets an index that stands for remote atoms or for systems (or stand-ins for positions), and "
            "what scripted code does with it can't be seen",
            "Use the eager module or function (not torch.jit.script), a JitAdapter for it in the model's spec, or gather and "
            "scatter outside it",
        )
    return call.run()
