"""Recognising the packages' own calculators, which are never imported for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def is_own_calculator(calc: Any, module: str, name: str, methods: Sequence[str] = ("calculate",)) -> bool:
    """Whether ``calc`` is a package's calculator with the physics that this has.

    Args:
        calc: any object.
        module, name: where the class is. A module that is not imported has made no calculator.
        methods: those that make the physics; a subclass with one of its own is another calculator.
    """
    theirs = getattr(sys.modules.get(module), name, None)
    if theirs is None or not isinstance(calc, theirs):
        return False
    return all(getattr(type(calc), method) is getattr(theirs, method) for method in methods)
