"""`LocalInt`, `LocalFloat`: Python numbers of this rank's rows, which lay out memory and are no part of the physics.

``h.shape[0]`` of rows of atoms is the number of *this rank's* atoms. A model may allocate, slice and loop with it; what
it multiplies or divides values by has to be everybody's. Both kinds behave as the number they are until they meet
values of floating point, which raises.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from nvdd.errors import DistributedOpError

_COMPUTES = frozenset({
    "add", "sub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "float_power", "clamp", "clamp_min",
    "clamp_max", "maximum", "minimum", "lerp", "addcmul", "addcdiv", "where", "fill", "masked_fill", "index_fill", "xlogy",
    "full_like", "new_full", "new_tensor",
})  # fmt: skip


class LocalInt(int):
    """A number of rows of this rank.

    It has no ``__torch_function__``: torch's parser does not take ``torch.zeros(n, 3)`` from a number that has one.
    """

    def __float__(self) -> float:
        raise refusal("float", self)

    def __reduce__(self):
        return int, (int(self),)


class LocalFloat(float):
    """A float that was computed from a `LocalInt`."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from nvdd.dispatch import op_name  # which imports this module

        kwargs = kwargs or {}
        check_numbers(op_name(func)[0], args, kwargs)
        return func(*plain_numbers(args), **plain_numbers(kwargs))

    def __reduce__(self):
        return float, (plain_numbers(self),)


def refusal(name: str, number: float) -> DistributedOpError:
    """The error where operation ``name`` computes with a number of this rank's rows."""
    from nvdd.dispatch import call_site

    site = call_site()
    return DistributedOpError(
        f"{name} at {site}: values are computed with {plain_numbers(number)}, which comes from the number of rows on this "
        "rank. Divide by data.n_atoms_per_system, or take .mean() over the rows: both count the atoms of all ranks. "
        "Where this rank's number is meant, write int(n).",
        name,
        site,
    )


def local_number(value: Any) -> Any:
    """``value`` as a number of this rank, unless it is none."""
    kind = type(value)
    return LocalInt(value) if kind is int else LocalFloat(value) if kind is float else value


def plain_numbers(value: Any) -> Any:
    """Without the mark, also inside lists, tuples and dicts."""
    kind = type(value)
    if kind is LocalInt:
        return int(value)
    if kind is LocalFloat:
        return float.__add__(value, 0.0)
    if kind is tuple or kind is list:
        return kind(map(plain_numbers, value))
    if kind is dict:
        return {k: plain_numbers(v) for k, v in value.items()}
    return tuple(map(plain_numbers, value)) if isinstance(value, tuple) and not hasattr(value, "_fields") else value


def check_numbers(name: str, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises where pointwise operation ``name`` computes floating-point values with a number of this rank.

    Comparisons, and whole numbers (``row * n + column``), lay out memory.
    """
    if name not in _COMPUTES:
        return
    values = (*args, *kwargs.values())
    number = next((v for v in values if isinstance(v, (LocalInt, LocalFloat))), None)
    if number is None:
        return
    dtype = kwargs.get("dtype")  # of what is allocated: indices may be filled with numbers of rows
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        return
    if isinstance(number, LocalFloat) or any(isinstance(v, Tensor) and v.dtype.is_floating_point for v in values):
        raise refusal(name, number)


def _operation(apply: Callable, reflected: bool) -> Callable:
    def operate(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        mine, others = plain_numbers(self), plain_numbers(other)
        return local_number(apply(others, mine) if reflected else apply(mine, others))

    return operate


def _unary(apply: Callable) -> Callable:
    return lambda self: local_number(apply(plain_numbers(self)))


for _kind in (LocalInt, LocalFloat):
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        setattr(_kind, f"__{_name}__", _operation(getattr(operator, _name), reflected=False))
        setattr(_kind, f"__r{_name}__", _operation(getattr(operator, _name), reflected=True))
    for _name in ("neg", "abs"):
        setattr(_kind, f"__{_name}__", _unary(getattr(operator, _name)))
