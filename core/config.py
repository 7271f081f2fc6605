"""`DomainConfig`: how one distributed run is divided."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nvdd.communicator import Communicator
from nvdd.errors import InputError
from nvdd.index_partition import GRAPH_PLANS
from nvdd.partition import BALANCES

COMPILERS = ("eager", "inductor", "cudagraphs", "inductor+cudagraphs")


class StrategyKind(str, Enum):
    """How a model is divided over ranks."""

    HALO = "halo"  # domains in space; remote rows through a halo
    GRAPH_PARTITION = "graph"  # runs of a list of atoms; geometry on every rank, features of owned atoms


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
        strategy: `StrategyKind`, or its value, ``"halo"`` or ``"graph"``.
        graph_plan: of the strategy ``"graph"``: ``"curve"`` or ``"blocks"``, see `IndexPartitioner`.
        compile: True to run forward and derivative as one compiled graph of fixed shapes: ``"inductor"``, and on GPUs
            whose messages can be captured (one rank, or NCCL) as a CUDA graph. Or which of the two:
            ``"inductor"``, ``"cudagraphs"``, ``"inductor+cudagraphs"``; ``"eager"`` runs the graph as it is.
        max_edges_per_chunk: compute with at most so many edges at a time, forward and backward, so that a rank's memory
            grows with its atoms instead of its edges; what is between a gather and a sum over edges is computed twice.
            None for all edges at once (of models that take edges in blocks, 4 million).
        recompute: as ``max_edges_per_chunk`` with all edges in one chunk: nothing of size of the edges is kept for the
            backward pass.
        ghost_width: A; within which `DomainParallel` looks for the atoms of other ranks. None for cutoff + skin; more
            than that makes searches rarer, as a larger skin does.
        migration_hysteresis: A by which an atom must have left its rank's domain before `DomainParallel` moves it to
            another rank; None for half the skin. 0 moves atoms at once.
        rebalance_every: steps after which `DomainParallel` may move the planes between domains, if one rank has more
            than 1.1 times the mean (not with ``grid_dims`` or ``balance="grid"``); None for never.
        balance_by: ``"atoms"`` or ``"time"`` that ranks compute: what is balanced then.
        device: where this rank computes; None for the mesh's device.

    Raises:
        InputError: a value that makes no sense, or options that don't go together (``"graph"`` with a grid,
            ``compile`` with ``recompute``); the message names it.
    """

    cutoff: float | None = None
    skin: float = 0.5
    mesh: Any = None
    mesh_dim: str | int | None = None
    grid_dims: Sequence[int] | None = None
    balance: str = "auto"
    strategy: StrategyKind = StrategyKind.HALO
    graph_plan: str = "curve"
    device: Any = None
    compile: bool | str = False
    max_edges_per_chunk: int | None = None
    recompute: bool = False
    ghost_width: float | None = None
    migration_hysteresis: float | None = None
    rebalance_every: int | None = 1000
    balance_by: str = "atoms"

    def __post_init__(self) -> None:
        if self.cutoff is not None and not self.cutoff > 0:
            raise InputError(f"DomainConfig: cutoff must be positive (A) or None, got {self.cutoff!r}")
        if not self.skin >= 0:
            raise InputError(f"DomainConfig: skin must be zero or positive (A), got {self.skin!r}")
        if self.balance not in BALANCES:
            raise InputError(f"DomainConfig: balance must be one of {', '.join(BALANCES)}, got {self.balance!r}")
        self._check_motion()
        self._check_memory()
        try:
            object.__setattr__(self, "strategy", StrategyKind(self.strategy))
        except ValueError:
            words = ", ".join(repr(k.value) for k in StrategyKind)
            raise InputError(f"DomainConfig: strategy must be one of {words}, got {self.strategy!r}") from None
        self._check_graph_plan()

    def _check_graph_plan(self) -> None:
        if self.graph_plan not in GRAPH_PLANS:
            raise InputError(
                f"DomainConfig: graph_plan must be one of {', '.join(map(repr, GRAPH_PLANS))}, got {self.graph_plan!r}"
            )
        if self.strategy is not StrategyKind.GRAPH_PARTITION:
            return
        if self.grid_dims is not None or self.balance != "auto":
            what = f"balance={self.balance!r}" if self.grid_dims is None else f"grid={tuple(self.grid_dims)!r}"
            raise InputError(
                f"DomainConfig: strategy 'graph' divides the list of atoms in equal parts, and {what} is of domains in "
                "space; leave it out, or take strategy='halo'"
            )

    @property
    def edges_at_once(self) -> int | None:
        """How many edges a rank computes with at a time; None for all, which autograd then keeps."""
        return sys.maxsize if self.recompute and self.max_edges_per_chunk is None else self.max_edges_per_chunk

    def _check_memory(self) -> None:
        n = self.max_edges_per_chunk
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
            raise InputError(f"DomainConfig: max_edges_per_chunk must be a positive whole number or None, got {n!r}")
        if not isinstance(self.recompute, bool):
            raise InputError(f"DomainConfig: recompute must be True or False, got {self.recompute!r}")
        if self.compile and self.edges_at_once is not None:
            which = "recompute=True" if n is None else f"max_edges_per_chunk={n}"
            raise InputError(f"DomainConfig: a compiled forward keeps what it needs; leave out compile, or {which}")

    def _check_motion(self) -> None:
        if not isinstance(self.compile, bool) and self.compile not in COMPILERS:
            words = ", ".join(map(repr, COMPILERS))
            raise InputError(f"DomainConfig: compile must be True, False or one of {words}, got {self.compile!r}")
        if self.ghost_width is not None and not self.ghost_width >= (self.cutoff or 0.0) + self.skin:
            raise InputError(
                f"DomainConfig: ghost_width {self.ghost_width!r} A is less than cutoff + skin = {(self.cutoff or 0.0) + self.skin:g} A; "
                "leave it out"
            )
        if self.migration_hysteresis is not None and not 0 <= self.migration_hysteresis < float("inf"):
            raise InputError(
                f"DomainConfig: migration_hysteresis must be zero or positive (A) or None, got {self.migration_hysteresis!r}"
            )
        every = self.rebalance_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise InputError(f"DomainConfig: rebalance_every must be a positive whole number of steps or None, got {every!r}")
        if self.balance_by not in ("atoms", "time"):
            raise InputError(f"DomainConfig: balance_by must be 'atoms' or 'time', got {self.balance_by!r}")

    def communicator(self, model_device: Any = "cpu") -> Communicator:
        """The ranks of ``mesh``; ``model_device`` is where one process computes if ``device`` doesn't say it.

        Raises:
            InputError: no mesh is given although this process is one of several ranks.
        """
        mesh = self.mesh
        if isinstance(mesh, Communicator):
            return mesh
        if mesh is None:
            self._refuse_default_group()
            return Communicator(None, self.device or model_device)
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
