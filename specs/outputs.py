"""How one named output of a model is shaped and combined over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class OutputKind(str, Enum):
    """Shape of an output."""

    PER_NODE = "per_node"  # (n_atoms, ...): owned rows
    PER_GRAPH = "per_graph"  # (n_systems, ...)
    GLOBAL = "global"  # the same on every rank already: passed through
    UNKNOWN = "unknown"  # not declared: refused over several ranks


class Reduce(str, Enum):
    """How an output's value on each rank becomes the global one."""

    NONE = "none"  # PER_NODE: owned rows are final; PER_GRAPH: the value is already summed over ranks
    ALL_REDUCE = "all_reduce"  # each rank has a share; the framework sums them
    OWNED_ONLY = "owned_only"  # owned rows are final even under a policy with halo rows


REDUCED_KIND = {Reduce.ALL_REDUCE: OutputKind.PER_GRAPH, Reduce.OWNED_ONLY: OutputKind.PER_NODE}


@dataclass(frozen=True)
class OutputSpec:
    """Kind and reduction of one output.

    Attributes:
        kind: shape.
        reduce: ``ALL_REDUCE`` goes with ``PER_GRAPH`` (such as a stress by the strain trick, of which each rank has a
            share), ``OWNED_ONLY`` with ``PER_NODE``.

    Raises:
        ValueError: a reduction that does not go with the kind.
    """

    kind: OutputKind
    reduce: Reduce = Reduce.NONE

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", OutputKind(self.kind))
        object.__setattr__(self, "reduce", Reduce(self.reduce))
        wanted = REDUCED_KIND.get(self.reduce, self.kind)
        if self.kind is not wanted:
            raise ValueError(
                f"OutputSpec: reduce={self.reduce.value!r} is for outputs of kind {wanted.value!r}, not {self.kind.value!r}"
            )
