"""What stands in for the places where chgnet's layers look at indices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nvdd.errors import DistributedOpError


class Columns:
    """Three indices (A,) where chgnet has a table (A, 3): ``graph[:, k]`` is one of them.

    They are rows of different things, atoms, bonds and bonds, which one tensor over ranks can't say.
    """

    def __init__(self, *columns: Tensor) -> None:
        self._columns = columns

    def __getitem__(self, item: tuple[slice, int]) -> Tensor:
        whole, column = item
        if whole != slice(None):
            raise TypeError(f"a graph of angles gives whole columns, graph[:, k]; asked for {item!r}")
        return self._columns[column]


def sum_by_owner(data: Tensor, owners: Tensor, *, average: bool = True, num_owner: int | None = None) -> Tensor:
    """For ``chgnet.model.layers.aggregate``, which counts the values of the index before it sums: sums alone."""
    if average or num_owner is None:
        raise DistributedOpError(
            f"chgnet asks for averages over neighbours (average={average}, num_owner={num_owner}), which its layers did not "
            "when this was written; nvdd knows chgnet 0.4"
        )
    return data.new_zeros(num_owner, data.shape[1]).index_add(0, owners, data)


def changes_all(layer: Any) -> bool:
    """Whether a layer for bonds changes those that have no angle, too."""
    biased = layer.use_mlp_out and any(getattr(part, "bias", None) is not None for part in layer.mlp_out.layers)
    return biased or layer.bond_norm is not None or not layer.resnet
