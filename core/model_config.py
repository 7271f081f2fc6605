"""What a model wrapper says of itself: outputs, inputs, neighbours, the layout of its edges."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum

# per-atom input of models -> what ASE calls it
ALIASES = {"charges": "initial_charges"}


def stored_name(name: str, fields: Container[str]) -> str | None:
    """The name under which an input of a model stands among ``fields``, its own or ASE's; None if it doesn't."""
    return next((known for known in (name, ALIASES.get(name)) if known is not None and known in fields), None)


class NeighborListFormat(str, Enum):
    """How a model takes its neighbours."""

    COO = "coo"  # a list of directed edges, (E, 2)
    MATRIX = "matrix"  # a dense (N, K) matrix of neighbour rows


@dataclass(frozen=True)
class NeighborConfig:
    """The neighbours that a model reads.

    Attributes:
        cutoff: distance in A; the model sees the edges with r < cutoff and no other, except where ``drops_far_edges``.
        format: COO or MATRIX.
        bonds: whether the model reads reverse edges or undirected bonds (``data.reverse_edges``,
            ``data.bond_of_edge``, ``data.edge_of_bond``).
        bond_cutoff: distance in A, at most ``cutoff``, within which edges have a bond and a reverse edge that the model
            reads: those in ``data.bonded_edges``; None: all edges.
        drops_far_edges: whether edges with r >= cutoff count exactly nothing in the model: it may be given some, within
            the skin, which spares a choice of edges at each step. For models that cost little more than that choice.
        blocks: whether the model reads its edges through `nvdd.sum_over_edges` alone, which makes them a part at a time, so
            that no list of them all is kept: for cutoffs with thousands of neighbours.

    Raises:
        ValueError: a cutoff that is not positive, or a ``bond_cutoff`` without bonds or beyond the cutoff.
    """

    cutoff: float
    format: NeighborListFormat = NeighborListFormat.COO
    bonds: bool = False
    bond_cutoff: float | None = None
    drops_far_edges: bool = False
    blocks: bool = False

    def __post_init__(self) -> None:
        if not self.cutoff > 0:
            raise ValueError(f"NeighborConfig: cutoff must be positive, got {self.cutoff!r} A")
        if self.bonds and self.drops_far_edges:
            raise ValueError("NeighborConfig: drops_far_edges=True does not go with bonds=True; leave one of them out")
        if self.blocks and self.bonds:
            raise ValueError("NeighborConfig: blocks=True makes edges a part at a time, bonds=True is of all edges: take one")
        if self.bond_cutoff is not None and not (self.bonds and 0 < self.bond_cutoff <= self.cutoff):
            raise ValueError(
                f"NeighborConfig: bond_cutoff must be between 0 and the cutoff, {self.cutoff!r} A, and goes with bonds=True; "
                f"got {self.bond_cutoff!r} A and bonds={self.bonds!r}"
            )

    @property
    def bond_reach(self) -> float | None:
        """Within which distance edges have a bond, A; None if the model reads none."""
        if not self.bonds:
            return None
        return self.cutoff if self.bond_cutoff is None else self.bond_cutoff


@dataclass
class ModelConfig:
    """Outputs and inputs of a model wrapper.

    Attributes:
        outputs: names of everything that the model can deliver, in ASE's words: ``energy`` (n_systems,) eV,
            ``energies`` (n_atoms,) eV, ``forces`` (n_atoms, 3) eV/A, ``stress`` (n_systems, 3, 3) eV/A^3, ...
        active_outputs: the ones that are computed now.
        autograd_outputs: those that are derivatives of the energy; the framework derives them, the wrapper's
            ``forward`` need not return them.
        autograd_inputs: what the energy is differentiated by.
        neighbor_config: cutoff and format of the neighbours.
        node_inputs: names of further per-atom inputs, read from ``atoms.arrays``; ``charges`` are the initial charges of ASE,
            LAMMPS's ``atom->q``, or another model's.
        system_inputs: names of further per-system inputs, read from ``atoms.info`` (``charge``, ``spin``, ...).
        optional_inputs: those of both that have a usual value, where a host (LAMMPS) has no such input at all.
        elements: atomic numbers that the model knows; None if it takes any.
        pbc: the only periodicity along the three cell vectors for which the model has a meaning; None if it takes any.
        differentiated: of a model that returns both, whether forces are derivatives of ``"energies"`` or, where that
            costs less (sums over all atoms), of the per-system ``"energy"``. Values come from energies in any case.

    Raises:
        ValueError: ``optional_inputs`` that are no inputs, ``active_outputs`` that are no outputs, or another
            word in ``differentiated``.
    """

    outputs: frozenset[str] = frozenset({"energy", "energies", "forces", "stress", "stresses"})
    active_outputs: set[str] = field(default_factory=lambda: {"energy", "forces"})
    autograd_outputs: frozenset[str] = frozenset({"forces", "stress", "stresses"})
    autograd_inputs: frozenset[str] = frozenset({"positions"})
    neighbor_config: NeighborConfig | None = None
    node_inputs: frozenset[str] = frozenset()
    system_inputs: frozenset[str] = frozenset()
    optional_inputs: frozenset[str] = frozenset()
    elements: frozenset[int] | None = None
    pbc: tuple[bool, bool, bool] | None = None
    differentiated: str = "energies"

    def __post_init__(self) -> None:
        if further := self.optional_inputs - self.node_inputs - self.system_inputs:
            raise ValueError(f"ModelConfig: optional_inputs {sorted(further)} are not among node_inputs and system_inputs")
        unknown = set(self.active_outputs) - set(self.outputs)
        if unknown:
            raise ValueError(
                f"ModelConfig: active_outputs {sorted(unknown)} are not among outputs {sorted(self.outputs)}"
            )
        if self.differentiated not in ("energies", "energy"):
            raise ValueError(f"ModelConfig: differentiated must be 'energies' or 'energy', got {self.differentiated!r}")


@dataclass(frozen=True)
class EdgeLayout:
    """How a wrapper reads a directed edge (sender -> receiver); the receiver is the centre atom.

    Attributes:
        sender_column: the column of ``neighbor_list`` (the row of ``edge_index``) that holds the sender.
        vector: ``"sender_minus_receiver"`` (neighbour minus centre: SevenNet, NequIP, CHGNet, LAMMPS) or
            ``"receiver_minus_sender"`` (MACE). ``edge_vectors`` and ``neighbor_list_shifts`` have this sign.

    ``neighbor_list`` (E, 2) and its transpose ``edge_index`` (2, E) are both at hand in a
    :class:`~nvdd.data.Batch`, whichever shape a model wants.

    Raises:
        ValueError: another column or word.
    """

    sender_column: int = 1
    vector: str = "sender_minus_receiver"

    def __post_init__(self) -> None:
        if self.sender_column not in (0, 1):
            raise ValueError(f"EdgeLayout: sender_column must be 0 or 1, got {self.sender_column!r}")
        if self.vector not in ("sender_minus_receiver", "receiver_minus_sender"):
            raise ValueError(
                f"EdgeLayout: vector must be 'sender_minus_receiver' or 'receiver_minus_sender', got {self.vector!r}"
            )

    @property
    def sign(self) -> float:
        """+1 where the vector is x_sender - x_receiver, the core's convention; -1 where it is its negative."""
        return 1.0 if self.vector == "sender_minus_receiver" else -1.0
