"""`DomainConfig`: how one distributed run is divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nvdd.communicator import Communicator
from nvdd.errors import InputError
from nvdd.partition import BALANCES


class StrategyKind(str, Enum):
    """How a model is divided over ranks."""

    HALO = "halo"  # domains in space; remote rows through a halo


@dataclass(frozen=True)
class DomainConfig:
    """Geometry and ranks of a distributed run.

    Attributes:
        cutoff: of the neighbours, A; None for the model's own. May be larger than the model's, never smaller.
        skin: A; neighbours are searched within cutoff + skin, and again when an atom has moved more than skin / 2.
            The model sees the edges with r < its cutoff and no others, whatever the skin.
        mesh: the ranks: a `Communicator`, a ``torch.distributed.device_mesh.DeviceMesh`` or a process group; None
            for one rank.
        mesh_dim: the dimension of a mesh of several dimensions over which atoms are divided.
        grid_dims: ranks along each cell vector; None to choose.
        balance: ``"auto"``, ``"grid"`` or ``"rcb"``, see `SpatialPartitioner`.
        strategy: `StrategyKind`.
        device: where this rank computes; None for the mesh's device.
    """

    cutoff: float | None = None
    skin: float = 0.5
    mesh: Any = None
    mesh_dim: str | int | None = None
    grid_dims: Sequence[int] | None = None
    balance: str = "auto"
    strategy: StrategyKind = StrategyKind.HALO
    device: Any = None

    def __post_init__(self) -> None:
        if self.cutoff is not None and not self.cutoff > 0:
            raise InputError(f"DomainConfig: cutoff must be positive (A) or None, got {self.cutoff!r}")
        if not self.skin >= 0:
            raise InputError(f"DomainConfig: skin must be zero or positive (A), got {self.skin!r}")
        if self.balance not in BALANCES:
            raise InputError(f"DomainConfig: balance must be one of {', '.join(BALANCES)}, got {self.balance!r}")
        try:
            object.__setattr__(self, "strategy", StrategyKind(self.strategy))
        except ValueError:
            words = ", ".join(repr(k.value) for k in StrategyKind)
            raise InputError(f"DomainConfig: strategy must be one of {words}, got {self.strategy!r}") from None

    def communicator(self) -> Communicator:
        """The ranks of ``mesh``.

        Raises:
            InputError: no mesh is given although this process is one of several ranks.
        """
        mesh = self.mesh
        if isinstance(mesh, Communicator):
            return mesh
        if mesh is None:
            self._refuse_default_group()
            return Communicator(None, self.device or "cpu")
        if hasattr(mesh, "get_group"):
            return Communicator.from_mesh(mesh, self.mesh_dim, self.device)
        return Communicator(mesh, self.device or "cpu")

    @staticmethod
    def _refuse_default_group() -> None:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise InputError(
                f"DomainConfig: this process is one of {dist.get_world_size()} ranks, but no mesh is given; pass "
                "mesh=torch.distributed.device_mesh.init_device_mesh('cpu', (n_ranks,)), or mesh=Communicator(None) to "
                "compute on each rank by itself"
            )
