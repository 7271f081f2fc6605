"""`ForceStrategy` and `CompilePolicy`: how derivatives come about, and how a model is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ForceStrategy(str, Enum):
    """What the energy is differentiated by to get forces and stress."""

    # the energy depends on the geometry through edge vectors alone: forces, virial and per-atom virial
    # from one derivative; positions and cell are stand-ins that a model may only subtract and multiply
    EDGE_VECTORS = "edge_vectors"
    # the energy is a function of positions and cell: forces by positions, stress by a strain of both
    POSITIONS = "positions"
    # the model differentiates inside its forward and returns forces (and stress)
    MODEL_INTERNAL = "model_internal"
    # the model predicts forces (and stress) directly; they need not be a derivative of the energy
    DIRECT = "direct"


@dataclass(frozen=True)
class CompilePolicy:
    """What a model needs where it is compiled (`DomainConfig.compile`). Whether it is, is for who runs it to say.

    Attributes:
        static_shapes: whether atoms and edges may be filled up to capacities, so that the compiled graph stays the same
            from step to step; False refuses to be compiled.
        graph_padder: import path, ``"module:Class"``, of a subclass of `nvdd.COOPadder`; None for that.
        force_strategy: of the compiled forward; None for the spec's.

    Raises:
        ValueError: ``static_shapes`` is no bool, or ``graph_padder`` is no import path.
    """

    static_shapes: bool = True
    graph_padder: str | None = None
    force_strategy: ForceStrategy | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.static_shapes, bool):
            raise ValueError(f"CompilePolicy: static_shapes must be True or False, got {self.static_shapes!r}")
        padder = self.graph_padder
        if padder is not None and not (isinstance(padder, str) and all(padder.partition(":"))):
            raise ValueError(f"CompilePolicy: graph_padder={padder!r} is not an import path 'module:Class'")
        if self.force_strategy is not None:
            object.__setattr__(self, "force_strategy", ForceStrategy(self.force_strategy))
