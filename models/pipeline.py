"""`PipelineModelWrapper`: the sum of several models, with outputs of one as inputs of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, cast

import torch

from nvdd.errors import InputError
from nvdd.model_config import ModelConfig
from nvdd.models.base import BaseModelMixin, Batch, EdgeLayout, ModelOutputs, NeighborConfig
from nvdd.models.pipeline_forward import forward
from nvdd.specs import DistributionSpec, ForceStrategy, MLIPSpec, OutputKind, OutputSpec
from nvdd.specs.declared import ADDITIVE, block_name, declares_energy, spec_of
from nvdd.specs.merge import composed_policy, merge_names
from nvdd.wires import Wire, in_order


class PipelineModelWrapper(torch.nn.Module, BaseModelMixin):
    """The sum of models: energies, forces and stresses are those of all blocks together.

    Over ranks all blocks share one partition and one halo, made for the widest cutoff. Each block sees exactly the edges
    within its own cutoff, in its own edge layout, type and storage policy, and is differentiated by what its own spec
    says, so that blocks of any kind go together.

    Args:
        blocks: model wrappers, in eV and A.
        wires: which inputs of blocks are outputs of others, as ``input: (block, output)``; blocks are numbered from 0.
            ``{"charges": (0, "charges")}`` lets every other block that reads ``charges`` have those of block 0;
            ``{(2, "charges"): (0, "charges")}`` only block 2. ``(0, "charges", "fixed")`` leaves the dependence of
            the charges on the geometry out of the forces, which by default have it. ``None`` instead: the atoms' own.

    Attributes:
        composed_of: the blocks.
        wires: as a tuple of `nvdd.wires.Wire`.
        model_config: the widest cutoff, the inputs that no wire gives, the elements that all blocks know.

    Raises:
        InputError: a wire to or from a block, input or output that isn't there, in a circle, or into a model that
            differentiates itself; an input that another block predicts and that neither has a wire nor is given as None;
            no element that all blocks know.
        SpecConflictError: two blocks divide atoms in different ways; the message names both.

    Example::

        model = PipelineModelWrapper([MACEWrapper.from_checkpoint("medium-0b2"), EwaldModelWrapper()])
    """

    edge_layout = EdgeLayout()

    def __init__(self, blocks: Sequence[Any], wires: Mapping[Any, Any] | None = None) -> None:
        super().__init__()
        blocks = list(blocks)
        _check_blocks(blocks)
        self.blocks = torch.nn.ModuleList(blocks)
        self.wires = _resolved(blocks, wires or {})
        self._order = in_order(len(blocks), self.wires)
        feeding = {wire.source for wire in self.wires}
        for k, block in enumerate(blocks):
            if not _has_energy(block) and k not in feeding:
                raise InputError(
                    f"{block_name(k, block)} declares no energies or energy in its spec, and no other block reads its outputs"
                )
        self._spec = _composed_spec(blocks, self.wires)
        self.model_config = _composed_config(blocks, self.wires, self._spec)

    @property
    def composed_of(self) -> tuple[Any, ...]:
        """The blocks."""
        return tuple(self.blocks)

    @property
    def dtype(self) -> torch.dtype:
        """The widest of the blocks' types."""
        dtypes: list[Any] = [block.dtype for block in self.blocks]
        return reduce(torch.promote_types, dtypes)

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """A summary of the blocks' specs, for any ``strategy``; each block is evaluated under its own."""
        return self._spec

    def forward(self, data: Batch) -> ModelOutputs:
        """Of ``data`` in one process: the sums that the blocks return, and what else one of them gives.

        Where a block predicts forces, those of the others are derived here and added.
        """
        return forward(self, data, self._order)


def _check_blocks(blocks: list[Any]) -> None:
    if not blocks:
        raise InputError("PipelineModelWrapper needs at least one block")
    for k, block in enumerate(blocks):
        if not isinstance(block, torch.nn.Module) or not hasattr(block, "model_config"):
            raise InputError(
                f"block {k} of the pipeline is a {type(block).__name__}, not a model wrapper (BaseModelMixin)"
            )
        if hasattr(block, "composed_of"):
            raise InputError(f"{block_name(k, block)} is a pipeline itself: put its blocks into this one")
        if block.model_config.neighbor_config is None:
            raise InputError(f"{block_name(k, block)} has no neighbor_config, so its cutoff is unknown")
        if spec_of(block) is None:
            raise InputError(f"{block_name(k, block)} declares no distribution_spec; return a preset from it")


# --- wires ------------------------------------------------------------------------------------------------------


def _resolved(blocks: list[Any], wires: Mapping[Any, Any]) -> tuple[Wire, ...]:
    found: dict[tuple[int, str], Wire | None] = {}
    # those of one block count before those of all
    for key, value in sorted(wires.items(), key=lambda item: isinstance(item[0], str)):
        for target, name in _targets(blocks, key, value):
            found.setdefault((target, name), _wire(blocks, target, name, value))
    for target, block in enumerate(blocks):
        for name in sorted(_inputs(block) - {name for k, name in found if k == target}):
            givers = [k for k, other in enumerate(blocks) if k != target and name in _further_outputs(other)]
            if givers:
                raise InputError(
                    f"{block_name(target, block)} reads {name!r}, which {block_name(givers[0], blocks[givers[0]])} predicts: say "
                    f"which it shall have, wires={{{name!r}: ({givers[0]}, {name!r})}}, or {{{name!r}: None}} for the atoms' own"
                )
    return tuple(wire for wire in found.values() if wire is not None)


def _targets(blocks: list[Any], key: Any, value: Any) -> list[tuple[int, str]]:
    """Block and input that a key of ``wires`` means."""
    if isinstance(key, str):
        source = value[0] if isinstance(value, (tuple, list)) and value else None
        targets = [k for k, block in enumerate(blocks) if k != source and key in _inputs(block)]
        if not targets:
            known = sorted(set().union(*map(_inputs, blocks)))
            raise InputError(
                f"wires[{key!r}]: no block but its source reads {key!r}; blocks read {known or 'no inputs'}"
            )
        return [(k, key) for k in targets]
    if not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], str) and _is_number(key[0], blocks)):
        raise InputError(
            f"wires[{key!r}]: write an input's name, or (block, name) with a block from 0 to {len(blocks) - 1}"
        )
    target, name = key
    if name not in _inputs(blocks[target]):
        known = sorted(_inputs(blocks[target]))
        raise InputError(
            f"wires[{key!r}]: {block_name(target, blocks[target])} reads {known or 'no inputs'}, not {name!r}"
        )
    return [key]


def _wire(blocks: list[Any], target: int, name: str, value: Any) -> Wire | None:
    if value is None:
        return None
    label = f"wires: {name!r} of {block_name(target, blocks[target])}"
    right = isinstance(value, (tuple, list)) and len(value) in (2, 3) and isinstance(value[1], str)
    if not right or tuple(value[2:]) not in ((), ("fixed",)) or not _is_number(value[0], blocks):
        raise InputError(
            f"{label} is wired to {value!r}; write (block, output) or (block, output, 'fixed'), with a block from 0 to "
            f"{len(blocks) - 1}, or None for the atoms' own"
        )
    source, output = value[:2]
    if source == target:
        raise InputError(f"{label} is wired to an output of the same block")
    declared = spec_of(blocks[source]).outputs.get(output)
    giver = block_name(source, blocks[source])
    if declared is None:
        known = sorted(_further_outputs(blocks[source]))
        raise InputError(
            f"{label} is wired to {output!r} of {giver}, whose spec declares {known or 'no further outputs'}"
        )
    per_atom = name in blocks[target].model_config.node_inputs
    wanted = OutputKind.PER_NODE if per_atom else OutputKind.PER_GRAPH
    if declared.kind is not wanted:
        raise InputError(
            f"{label} is {wanted.value}, and {output!r} of {giver} is {declared.kind.value}: the shapes differ"
        )
    fixed = len(value) == 3
    if not fixed and spec_of(blocks[target]).force_strategy is ForceStrategy.MODEL_INTERNAL:
        raise InputError(
            f"{label} is wired, but this model differentiates inside its forward, so forces would lack the part that goes "
            f"through {name!r}; say that it is fixed, (block, output, 'fixed'), or let the framework differentiate it"
        )
    return Wire(source, output, target, name, fixed)


def _is_number(value: Any, blocks: list[Any]) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(blocks)


def _inputs(block: Any) -> set[str]:
    config = block.model_config
    return set(config.node_inputs | config.system_inputs)


def _further_outputs(block: Any) -> set[str]:
    return set(spec_of(block).outputs) - set(ADDITIVE)


# --- what the sum says of itself ----------------------------------------------------------------------------------


def _has_energy(block: Any) -> bool:
    return declares_energy(block, cast(MLIPSpec, spec_of(block)))


def _composed_spec(blocks: list[Any], wires: tuple[Wire, ...]) -> MLIPSpec:
    specs = [spec_of(block) for block in blocks]
    policy, name = specs[0].distribution.policy, block_name(0, blocks[0])
    for k, spec in enumerate(specs[1:], 1):
        other = block_name(k, blocks[k])
        policy, name = composed_policy(policy, spec.distribution.policy, (name, other)), f"{name} + {other}"
    strategies = {spec.force_strategy for spec in specs}
    strategy = next((s for s in (ForceStrategy.DIRECT, ForceStrategy.MODEL_INTERNAL, ForceStrategy.POSITIONS) if s in strategies),
                    ForceStrategy.EDGE_VECTORS)  # fmt: skip
    per_node, per_graph = OutputSpec(OutputKind.PER_NODE), OutputSpec(OutputKind.PER_GRAPH)
    kinds = {"energy": per_graph, "energies": per_node, "forces": per_node, "stress": per_graph, "stresses": per_node}
    outputs = {key: kinds[key] for key in _sums(blocks, wires)}
    for block in blocks:
        for key in sorted(_further_outputs(block)):
            outputs.setdefault(key, spec_of(block).outputs[key])
    adapters = {a.target: a for spec in reversed(specs) for a in spec.all_adapters}
    return MLIPSpec(
        DistributionSpec(policy),
        outputs,
        force_strategy=strategy,
        adapters=adapters.values(),
        name=reduce(merge_names, (spec.name for spec in specs)),
    )


def _sums(blocks: list[Any], wires: tuple[Wire, ...]) -> list[str]:
    """The sums that all blocks can give."""
    having = [block for block in blocks if _has_energy(block)]
    derived = lambda b: spec_of(b).force_strategy in (ForceStrategy.EDGE_VECTORS, ForceStrategy.POSITIONS)
    names = ["energy", "forces"]
    if all("energies" in spec_of(b).outputs and "energies" in b.model_config.outputs for b in having):
        names.append("energies")
    if all(derived(b) or "stress" in b.model_config.outputs for b in blocks):
        names.append("stress")
    # what goes through a wire into a function of positions has no share of each atom
    feeding = {wire.source for wire in wires if not wire.fixed}
    shares = lambda k, b: (
        spec_of(b).force_strategy is ForceStrategy.EDGE_VECTORS
        or (not derived(b) and k not in feeding and "stresses" in b.model_config.outputs)
    )
    if "stress" in names and all(shares(k, b) for k, b in enumerate(blocks)):
        names.append("stresses")
    return names


def _composed_config(blocks: list[Any], wires: tuple[Wire, ...], spec: MLIPSpec) -> ModelConfig:
    configs = [block.model_config for block in blocks]
    wired = {(wire.target, wire.input) for wire in wires}
    own = lambda field: frozenset(n for k, c in enumerate(configs) for n in getattr(c, field) if (k, n) not in wired)
    inputs = lambda c: c.node_inputs | c.system_inputs
    needed = {n for k, c in enumerate(configs) for n in inputs(c) - c.optional_inputs if (k, n) not in wired}
    given = set().union(*(c.outputs for c in configs)) | set(ADDITIVE)
    cutoff = max(c.neighbor_config.cutoff for c in configs)
    bonds = max((r for c in configs if (r := c.neighbor_config.bond_reach) is not None), default=None)
    return ModelConfig(
        outputs=frozenset(given & set(spec.outputs)),
        neighbor_config=NeighborConfig(cutoff, bonds=bonds is not None, bond_cutoff=bonds),
        node_inputs=own("node_inputs"),
        system_inputs=own("system_inputs"),
        optional_inputs=own("optional_inputs") - needed,
        elements=_common_elements(blocks),
        pbc=_common_pbc(blocks),
    )


def _common_pbc(blocks: list[Any]) -> tuple[bool, bool, bool] | None:
    asked = [(k, b.model_config.pbc) for k, b in enumerate(blocks) if b.model_config.pbc is not None]
    for (i, one), (j, other) in pairwise(asked):
        if one != other:
            names = block_name(i, blocks[i]), block_name(j, blocks[j])
            raise InputError(f"{names[0]} is for pbc {one} only, {names[1]} for {other}: no structure suits both")
    return asked[0][1] if asked else None


def _common_elements(blocks: list[Any]) -> frozenset[int] | None:
    known = [(k, b.model_config.elements) for k, b in enumerate(blocks) if b.model_config.elements is not None]
    if not known:
        return None
    common = frozenset.intersection(*(frozenset(e) for _, e in known))
    if not common:
        from ase.data import chemical_symbols

        each = "; ".join(
            f"{block_name(k, blocks[k])}: {', '.join(chemical_symbols[z] for z in sorted(e))}" for k, e in known
        )
        raise InputError(f"there is no element that all blocks know: {each}")
    return common
