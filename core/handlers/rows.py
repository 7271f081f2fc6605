"""Where the row dimension of a tensor ends up: pure shape rules, used by the handler families.

Each rule takes the shapes before and after an operation and the dimension that counts rows (atoms or edges), and
gives that dimension in the result, or None where rows would be mixed or cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


def positive(dim: int, n_dims: int) -> int:
    """A dimension counted from the front."""
    return dim + n_dims if dim < 0 else dim


def dims_of(dim: int | Sequence[int] | None, n_dims: int) -> tuple[int, ...]:
    """The dimensions that a reduction runs over; all of them for None or ()."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(n_dims))
    many: Iterable[int] = dim if isinstance(dim, (tuple, list)) else (dim,)
    return tuple(positive(d, n_dims) for d in many)


def after_broadcast(n_dims: int, row_dim: int, out_dims: int) -> int:
    """Elementwise operations line shapes up at the right."""
    return row_dim + out_dims - n_dims


def after_reduction(row_dim: int, dims: Sequence[int], keepdim: bool) -> int | None:
    """Row dimension after a reduction over ``dims``; None if rows are among them."""
    if row_dim in dims:
        return None
    return row_dim if keepdim else row_dim - sum(d < row_dim for d in dims)


def after_view(shape: Sequence[int], row_dim: int, out_shape: Sequence[int]) -> int | None:
    """Row dimension after a reshape.

    In row-major order a dimension survives where the product of the sizes before it and its own size are kept.
    """
    before, n = math.prod(shape[:row_dim]), shape[row_dim]
    rest, out_rest = math.prod(shape[row_dim + 1 :]), 1
    for dim in range(len(out_shape)):
        out_rest = math.prod(out_shape[dim + 1 :])
        if out_shape[dim] == n and math.prod(out_shape[:dim]) == before and (out_rest == rest):
            # where sizes of 1 make several places possible they are the same place in memory only if n == 1 too;
            # the first is right because nothing but 1s stands between
            return dim
    return None


def after_matmul(dims: int, row_dim: int, other_dims: int, first: bool, out_dims: int) -> int | None:
    """Row dimension after ``a @ b`` for the operand with rows, which is ``a`` if ``first``."""
    from_right = dims - row_dim  # 1: last dimension
    if dims == 1:
        return None
    if first:
        if from_right == 1:
            return None
        lost = 1 if other_dims == 1 else 0
        return out_dims - from_right + lost
    if from_right == 2:
        return None
    lost = 1 if other_dims == 1 else 0
    return out_dims - from_right if from_right == 1 else out_dims - from_right + lost


def after_einsum(equation: str, operands: Sequence[tuple[int, int | None]], out_dims: int) -> int | None:
    """Row dimension of an einsum; ``operands`` are (number of dims, row dim or None)."""
    equation = equation.replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    if not arrow:  # the letters that occur once, in alphabetical order
        letters = inputs.replace(",", "").replace(".", "")
        output = "..." * ("..." in inputs) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    row_letters = set()
    for term, (n_dims, row_dim) in zip(inputs.split(","), operands, strict=True):
        if row_dim is None:
            continue
        letters = _spread(term, n_dims)
        row_letters.add(letters[row_dim])
    if len(row_letters) != 1:
        return None
    letter = row_letters.pop()
    out = _spread(output, out_dims)
    return out.index(letter) if letter in out else None


def _spread(term: str, n_dims: int) -> list[str]:
    if "..." not in term:
        return list(term)
    left, _, right = term.partition("...")
    hidden = n_dims - len(left) - len(right)
    # hidden dimensions line up at the right across operands
    return [*left, *(f".{hidden - k}" for k in range(hidden)), *right]


def after_permutation(permute: Callable[[Tensor], Tensor], n_dims: int, row_dim: int) -> int:
    """Row dimension after ``permute``, seen on a tensor without memory whose sizes tell dimensions apart."""
    moved = permute(torch.empty([d + 2 for d in range(n_dims)], device="meta"))
    return list(moved.shape).index(row_dim + 2)


def after_repeat(n_dims: int, row_dim: int, factors: Sequence[int]) -> int | None:
    """Row dimension after ``x.repeat(*factors)``."""
    new = len(factors) - n_dims
    return row_dim + new if factors[row_dim + new] == 1 else None


def is_whole(item: object, n: int) -> bool:
    """Whether indexing ``n`` rows by ``item`` keeps all of them, in their order."""
    return isinstance(item, slice) and item in (slice(None), slice(n), slice(0, n))


def _moves_to_front(items: Sequence[object]) -> bool:
    """Whether index tensors stand apart, in which case torch puts their dimension first."""
    advanced = [k for k, i in enumerate(items) if not (i is None or i is Ellipsis or isinstance(i, slice))]
    lists = any(not isinstance(items[k], int) for k in advanced)
    return lists and len(advanced) > 1 and advanced[-1] - advanced[0] >= len(advanced)


def after_basic_index(index: object, shape: Sequence[int], row_dim: int) -> int | None:
    """Row dimension after ``x[index]`` with ints, slices, None and Ellipsis, which must not cut rows.

    ``x[:n]`` with exactly the number of rows cuts none; ``x[:1000]`` of 700 rows is no such thing, for the rows of
    all ranks may be more than 1000.

    Indexing of other dimensions by lists or tensors keeps the place of rows if they come first.
    """
    n_dims = len(shape)
    items = list(index) if isinstance(index, tuple) else [index]
    if _moves_to_front(items):
        return None
    consumed = sum(1 for i in items if i is not None and i is not Ellipsis)
    if Ellipsis in [i for i in items if i is None or i is Ellipsis]:
        at = next(k for k, i in enumerate(items) if i is Ellipsis)
        items[at : at + 1] = [slice(None)] * (n_dims - consumed)
    else:
        items += [slice(None)] * (n_dims - consumed)
    dim, out, found = 0, 0, None
    for item in items:
        if item is None:
            out += 1
            continue
        if dim == row_dim:
            if not is_whole(item, shape[row_dim]):
                return None
            found = out
        if not isinstance(item, (int, slice)) and found is None:
            return None  # an advanced index before the rows may move them
        dim += 1
        out += not isinstance(item, int)
    return found
