"""What a model wrapper declares of itself."""

from __future__ import annotations

from typing import Any

from nvdd.specs.spec import MLIPSpec

# outputs that the blocks of a sum add up; any other one is that of the block that gives it
ADDITIVE = frozenset({"energy", "energies", "forces", "stress", "stresses", "virial", "pair_forces"})


def spec_of(wrapper: Any, strategy: Any = None) -> MLIPSpec | None:
    """The spec of a wrapper: ``distribution_spec`` may be a method, a property or an attribute."""
    declared = getattr(wrapper, "distribution_spec", None)
    return declared(strategy) if callable(declared) else declared


def declares_energy(wrapper: Any, spec: MLIPSpec) -> bool:
    """Whether the wrapper says, in its configuration and in its spec, that it gives an energy."""
    return bool({"energy", "energies"} & set(wrapper.model_config.outputs) & set(spec.outputs))


def block_name(k: int, wrapper: Any) -> str:
    """How messages call a block of a sum."""
    return f"block {k} ({type(wrapper).__name__})"
