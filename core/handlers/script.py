"""Scripted modules (``torch.jit``): outside dispatch. They get plain tensors and give plain tensors."""

from __future__ import annotations

from nvdd.dispatch import Call, register
from nvdd.roles import Role


def _is_scripted(call: Call) -> bool:
    return type(call.func).__name__ in ("ScriptMethod", "ScriptFunction")


@register("*", when="a scripted module", does="plain tensors in, plain tensors out", predicate=_is_scripted)
def scripted(call: Call):
    if call.has(Role.SENDER, Role.EDGE_INDEX, Role.SYSTEM_INDEX, Role.ANCHOR):
        raise call.refuse(
            "a scripted module gets an index that stands for remote atoms or for systems, and what it does with it can't be seen",
            "Use the eager module (not torch.jit.script), or gather and scatter outside it",
        )
    return call.run()
