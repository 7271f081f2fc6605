"""Storage policies: how rows of per-atom tensors are laid out over ranks, and what a gather or scatter does."""

from __future__ import annotations

from dataclasses import dataclass

SCATTER_MODES = ("halo_correction", "local", "distributed")
GATHER_MODES = ("halo_fetch", "halo_read", "local", "distributed")


@dataclass(frozen=True)
class StoragePolicy:
    """Base of the storage policies.

    Attributes:
        system_reductions: whether sums over atoms (of one system or all) are summed over ranks.
    """

    system_reductions: bool = True


@dataclass(frozen=True)
class HaloStoragePolicy(StoragePolicy):
    """Rows ``[owned | halo]``: a rank reads remote rows through a halo.

    Attributes:
        scatter_mode: ``"local"``: receivers are owned, so a scatter is complete where it is;
            ``"halo_correction"``: partial sums in halo rows go back to their owners, and the halo is refreshed.
        gather_mode: ``"halo_fetch"``: per-atom tensors have owned rows, and a gather by senders fetches the halo
            rows first; ``"halo_read"``: per-atom tensors have owned and halo rows, and a gather reads them.
    """

    scatter_mode: str = "halo_correction"
    gather_mode: str = "halo_read"

    def __post_init__(self) -> None:
        if (self.gather_mode, self.scatter_mode) not in (
            ("halo_fetch", "local"),
            ("halo_read", "halo_correction"),
            ("halo_read", "local"),
        ):
            raise ValueError(
                f"HaloStoragePolicy: gather_mode={self.gather_mode!r} with scatter_mode={self.scatter_mode!r} has no meaning; "
                "use halo_fetch with local (owned rows), halo_read with halo_correction (owned and halo rows), or "
                "halo_read with local (the backbone computes its own messages to halo rows)"
            )

    @property
    def fetches(self) -> bool:
        """Whether per-atom tensors have owned rows only and gathers fetch the rest."""
        return self.gather_mode == "halo_fetch"
