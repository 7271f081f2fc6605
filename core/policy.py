"""Storage policies: how rows of per-atom tensors are laid out over ranks, and what a gather or scatter does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

SCATTER_MODES = ("halo_correction", "local", "distributed")
GATHER_MODES = ("halo_fetch", "halo_read", "local", "distributed")


@dataclass(frozen=True)
class StoragePolicy:
    """Base of the storage policies; a spec has one of its subclasses.

    Attributes:
        scatter_mode: what a scatter by an edge index does.
        gather_mode: what reading rows by an edge index does.
        system_reductions: whether sums over atoms (of one system or all) are summed over ranks. If not, a model that
            makes such a sum is refused.

    Raises:
        TypeError: this base itself is made.
        ValueError: a mode that the policy does not have, or modes that make no sense together.
    """

    scatter_mode: str = "local"
    gather_mode: str = "local"
    system_reductions: bool = True

    kind: ClassVar[str] = ""  # name in files
    # (gather_mode, scatter_mode) -> what the two mean together
    meanings: ClassVar[dict[tuple[str, str], str]] = {}

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not self.meanings:
            raise TypeError(f"{name} is the base of the storage policies; use one of {', '.join(sorted(_names()))}")
        for knob, value, known in (
            ("scatter_mode", self.scatter_mode, SCATTER_MODES),
            ("gather_mode", self.gather_mode, GATHER_MODES),
        ):
            if value not in known:
                raise ValueError(f"{name}: {knob}={value!r} is not one of {', '.join(map(repr, known))}")
        if not isinstance(self.system_reductions, bool):
            raise ValueError(f"{name}: system_reductions must be True or False, got {self.system_reductions!r}")
        if (self.gather_mode, self.scatter_mode) not in self.meanings:
            choices = "; ".join(f"{g} with {s} ({why})" for (g, s), why in self.meanings.items())
            raise ValueError(
                f"{name}: gather_mode={self.gather_mode!r} with scatter_mode={self.scatter_mode!r} has no meaning; "
                f"use {choices}"
            )


@dataclass(frozen=True)
class HaloStoragePolicy(StoragePolicy):
    """Rows ``[owned | halo]``: a rank reads remote rows through a halo.

    Attributes:
        scatter_mode: ``"local"``: receivers are owned, so a scatter is complete where it is;
            ``"halo_correction"``: partial sums in halo rows go back to their owners, and the halo is refreshed.
        gather_mode: ``"halo_fetch"``: per-atom tensors have owned rows, and a gather by senders fetches the halo
            rows first; ``"halo_read"``: per-atom tensors have owned and halo rows, and a gather reads them.
        system_reductions: see `StoragePolicy`.
    """

    scatter_mode: str = "halo_correction"
    gather_mode: str = "halo_read"

    kind: ClassVar[str] = "halo"
    meanings: ClassVar[dict[tuple[str, str], str]] = {
        ("halo_fetch", "local"): "owned rows, halo rows fetched where senders are read",
        ("halo_read", "halo_correction"): "owned and halo rows, refreshed at each scatter",
        ("halo_read", "local"): "owned and halo rows; the model computes its own messages to halo rows",
    }

    @property
    def fetches(self) -> bool:
        """Whether per-atom tensors have owned rows only and gathers fetch the rest."""
        return self.gather_mode == "halo_fetch"


@dataclass(frozen=True)
class ShardedStoragePolicy(StoragePolicy):
    """Owned rows only, and indices whose values are global ids: for models that compute with their indices.

    Attributes:
        scatter_mode: ``"distributed"``: rows written by global id go to their owners, which sum them;
            ``"local"``: receivers are owned, nothing is sent.
        gather_mode: ``"distributed"``: rows read by global id come from their owners.
        system_reductions: see `StoragePolicy`.
    """

    scatter_mode: str = "distributed"
    gather_mode: str = "distributed"

    kind: ClassVar[str] = "sharded"
    meanings: ClassVar[dict[tuple[str, str], str]] = {
        ("distributed", "distributed"): "rows are read from and written to their owners",
        ("distributed", "local"): "rows are read from their owners, written where they are owned",
    }


@dataclass(frozen=True)
class LocalStoragePolicy(StoragePolicy):
    """Owned rows, and no rows cross: for models that read neighbours only through edge vectors and inputs.

    A gather of computed rows by senders is refused. It is the neutral element where specs are composed: what a spec
    with this policy adds can be joined to any other one. ``scatter_mode`` and ``gather_mode`` are ``"local"``;
    ``system_reductions`` as in `StoragePolicy`.
    """

    kind: ClassVar[str] = "local"
    meanings: ClassVar[dict[tuple[str, str], str]] = {("local", "local"): "nothing crosses"}


@dataclass(frozen=True)
class GraphParallelPolicy(StoragePolicy):
    """Geometry on every rank, features of owned rows: for models that build their own graph (UMA, eSCN).

    Attributes:
        scatter_mode: ``"local"``: each rank has all edges into its rows.
        gather_mode: ``"distributed"``: features of other ranks' rows are gathered in each layer.
        system_reductions: see `StoragePolicy`.
    """

    scatter_mode: str = "local"
    gather_mode: str = "distributed"

    kind: ClassVar[str] = "graph_parallel"
    meanings: ClassVar[dict[tuple[str, str], str]] = {
        ("distributed", "local"): "features are gathered in each layer, each rank has all edges into its rows"
    }


POLICIES: dict[str, type[StoragePolicy]] = {
    policy.kind: policy for policy in (HaloStoragePolicy, ShardedStoragePolicy, LocalStoragePolicy, GraphParallelPolicy)
}


def _names() -> list[str]:
    return [policy.__name__ for policy in POLICIES.values()]
