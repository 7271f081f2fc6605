"""From an error on a rank to what is wrong with the model or its spec, and what to do about it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nvdd.errors import DistributedOpError, RankError


@dataclass(frozen=True)
class Diagnosis:
    """One finding.

    Attributes:
        kind: a word for programs, listed in docs/validate.md.
        text: what is wrong.
        remedy: what to do.
        output: the output that it is about, or ``namespace::op:position`` of an adapter, if any.
    """

    kind: str
    text: str
    remedy: str
    output: str = ""

    @property
    def key(self) -> str:
        """``kind`` or ``kind:output``."""
        return f"{self.kind}:{self.output}" if self.output else self.kind

    def __str__(self) -> str:
        return f"{self.text}. {self.remedy}."


@dataclass(frozen=True)
class _Rule:
    kind: str
    pattern: str  # searched in the message
    text: str  # {0}, {1}, ... are the pattern's groups; {error} the first line of the message
    remedy: str
    names: bool = False  # whether the groups name what it is about: an output, or op:position of an adapter


_RULES = (
    _Rule(
        "missing-op-adapter",
        r"(\w+::\w+)\(.*has no OpAdapter for it",
        "the custom op {0} is opaque to nvdd, and no OpAdapter says what it does with atoms and edges",
        "Declare OpAdapter(op=torch.ops.<namespace>.<op>.default, arg_transforms=..., output_transforms=...) in "
        "spec.distribution.custom_ops: GatherInputs() for inputs whose neighbour rows the kernel reads, ScatterOutputs() or "
        "SliceOutputsOwned() for per-atom outputs, AllReduceSum() for per-system ones",
        names=True,
    ),
    _Rule(
        "double-padding",
        r"(\w+::\w+)\(.*would pad rows twice",
        "GatherInputs is declared for rows that are padded already: {error}",
        "Drop GatherInputs() from the adapter's arg_transforms: under halo_read every per-atom tensor has its halo rows",
        names=True,
    ),
    _Rule(
        "missing-gather-inputs",
        r"(\w+::\w+)\(.*it has owned rows only, and the kernel gets senders.*arg_transforms=\{(\d+): GatherInputs",
        "the kernel of {0} reads neighbours in its argument {1}, which has owned rows only",
        "Declare arg_transforms={{{1}: GatherInputs()}} in its OpAdapter",
        names=True,
    ),
    _Rule(
        "missing-output-transform",
        r"(\w+::\w+)\(.*result (\d+): it has neither a transform nor a role",
        "the OpAdapter of {0} doesn't say what its result {1} is",
        "Declare output_transforms={{{1}: ScatterOutputs()}} for sums into rows of atoms (SliceOutputsOwned() under halo_fetch), "
        "AllReduceSum() for sums over atoms, or output_roles={{{1}: Role.OWNED}} for rows that are final",
        names=True,
    ),
    _Rule(
        "adapter-rows",
        r"(\w+::\w+)\((?:.*)(?:this has shape|takes rows of atoms|takes owned and halo rows|is for this rank's rows)",
        "the OpAdapter of {0} and the rows that it gets don't fit: {error}",
        "Compare the transforms with what the kernel reads and allocates",
    ),
    _Rule(
        "double-padding",
        r"a tensor of shape (\(.*?\)) was given where (\d+) (owned|owned and halo) rows of (\w+) are expected",
        "a transform got {0} where {1} {2} rows are expected: the tensor has the rows already, or has lost them",
        "Drop GatherInputs() from arguments that are padded already (every per-atom tensor is, under halo_read), and "
        "ScatterOutputs() or SliceOutputsOwned() from outputs that have owned rows",
    ),
    _Rule(
        "index-values",
        r"the values of an edge index are rows of this rank's atoms|global ids are compared or computed with",
        "the model computes or compares with the values of an edge index (the `edge_index < n_atoms` idiom is the usual one): "
        "{error}",
        "Delete the mask: there are no padding edges, and on one rank it would drop every edge to another rank's atom. "
        "Indices are for gathers and scatters only",
    ),
    _Rule(
        "local-number",
        r"comes from the number of rows on this rank",
        "values are computed with a number of this rank's atoms or edges: {error}",
        "Divide by data.n_atoms_per_system, or take .mean(); where this rank's number is meant, write int(n)",
    ),
    _Rule(
        "stand-in",
        r"stand-ins under ForceStrategy\.EDGE_VECTORS",
        "the energy is a function of positions or cell, not of edge vectors alone: {error}",
        "Declare force_strategy=ForceStrategy.POSITIONS in the spec (MODEL_INTERNAL if the model differentiates itself), or "
        "build on data.edge_vectors",
    ),
    _Rule(
        "batch-norm-training",
        r"BatchNorm in training",
        "BatchNorm in training takes means over the atoms of one rank",
        "Call model.eval() in the factory; for training use LayerNorm",
    ),
    _Rule(
        "random",
        r"random numbers would depend on how atoms are divided",
        "the forward draws random numbers, which depend on how atoms are divided",
        "Call model.eval() in the factory, or remove the noise from the forward",
    ),
    _Rule(
        "not-known-summed",
        r"output '(\w+)' .* is declared PER_GRAPH, but it is not known to be summed over ranks",
        "output {0!r} is per system, but nothing says that it is summed over ranks",
        "Return per-atom values, or sum with index_add by data.batch outside scripted code, or declare each rank's value as "
        "its share: OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE)",
        names=True,
    ),
    _Rule(
        "scripted-op",
        r"scripted code does with it|a scripted (?:module|function)|TorchScript",
        "TorchScript code hides its gathers and scatters from nvdd: {error}",
        "Use the eager function (not torch.jit.script), gather and scatter outside it, or declare a JitAdapter with an eager "
        "replacement",
    ),
    _Rule(
        "undeclared-output",
        r"output '(\w+)' .* is not declared in the model's spec",
        "output {0!r} is not declared in the spec",
        "Add it to MLIPSpec(outputs={...}) with its kind",
        names=True,
    ),
    _Rule(
        "wrong-kind",
        r"output '(\w+)' .* is declared PER_NODE but",
        "output {0!r} is declared PER_NODE, but what the model returns is not one row for each atom",
        "Declare the kind that it has, or return data.n_atoms rows",
        names=True,
    ),
    _Rule(
        "severed-graph",
        r"does not depend on the geometry|does not require grad and does not have a grad_fn"
        r"|differentiated Tensors? .*appears? to not have been used",
        "the energy does not depend on the geometry through autograd: the graph is severed",
        "Look for no_grad, detach, .data, NumPy, or a custom op without register_autograd between data.edge_vectors and the "
        "energies; a model that predicts forces by itself declares ForceStrategy.DIRECT",
    ),
    _Rule(
        "severed-graph",
        r"the spec says that the model itself returns forces",
        "the spec says that the model returns forces itself, and it does not",
        "Return them, or declare force_strategy=ForceStrategy.EDGE_VECTORS",
    ),
    _Rule(
        "one-process-input",
        r"this Batch has no field '(\w+)'",
        "the sample has no {0!r}, which the model reads",
        "Put it into atoms.arrays or atoms.info of the sample, and its name into ModelConfig(node_inputs=, system_inputs=)",
    ),
    _Rule(
        "out-of-step",
        r"ranks are out of step|killed by signal 6|no answer to 'run' within|gloo.*(?:size|length) mismatch|[Cc]onnection (?:closed|reset)",
        "the ranks take different paths: one skipped an exchange or a sum that the others made ({error})",
        "Look for a branch on the number of atoms or edges (`if len(data.senders) == 0`), a loop whose length differs, or an "
        "early return around a gather or a sum; run the same operations for zero edges",
    ),
    _Rule(
        "mixes-rows",
        r"may mix rows of atoms or edges|runs along the rows|sums over rows or gives every pair of rows|picks (?:single )?atoms or"
        r" edges|places on this rank|all pairs|every pair of rows|cuts rows|merges rows|row of a single edge|the norm runs over"
        r" rows|by their place",
        "an operation mixes rows of atoms or edges that are divided over ranks: {error}",
        "Write it with gathers by edge index and scatters over receivers, senders or systems; all-pairs and sorting models need "
        "every atom on each rank (the graph-partition strategy). In a third-party helper: replace it by a PythonAdapter",
    ),
)


def translate(error: BaseException) -> Diagnosis:
    """The diagnosis of an exception; of one that no rule knows, its own words."""
    message = _message(error)
    for rule in _RULES:
        match = re.search(rule.pattern, message, flags=re.DOTALL)
        if match:
            groups = match.groups()
            output = ":".join(groups) if rule.names else ""
            text = rule.text.format(*groups, error=_brief(message))
            remedy = rule.remedy.format(*groups) if "{{" in rule.remedy else rule.remedy
            return Diagnosis(rule.kind, text, remedy, output)
    if isinstance(error, DistributedOpError):
        return Diagnosis("refused-op", _brief(message), "The message says what is possible instead")
    return Diagnosis(
        "error",
        f"the model fails: {type(error).__name__}: {_brief(message)}",
        "Run the factory and the sample in one process first; the traceback is in the attempt's `error`",
    )


def _message(error: BaseException) -> str:
    parts = [str(error)]
    if isinstance(error, RankError):
        parts.append(error.cause)
    while (cause := error.__cause__) is not None:
        parts.append(str(cause))
        error = cause
    return "\n".join(parts)


def _brief(message: str) -> str:
    """The first sentence."""
    line = message.strip().splitlines()[0] if message.strip() else "no message"
    sentence = re.split(r"(?<=[^.])\. (?=[A-Z])", line)[0]
    return (sentence if len(sentence) <= 400 else sentence[:400] + " ...").rstrip(".")
