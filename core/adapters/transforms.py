"""What happens to the arguments and results of an opaque operation: markers that an `OpAdapter` carries.

``nvdd.handlers.custom`` carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ArgTransform:
    """Base of the transforms of arguments."""


@dataclass(frozen=True)
class OutputTransform:
    """Base of the transforms of results."""


@dataclass(frozen=True)
class GatherInputs(ArgTransform):
    """(n_owned, ...) -> (n_padded, ...): the kernel reads neighbours' rows. Its adjoint sums them into their owners."""


@dataclass(frozen=True)
class GatherInputsFull(ArgTransform):
    """(n_owned, ...) -> (n_global + 1, ...): rows of all atoms by global id, then one row of zeros.

    The edge indices of the same call are then global ids, too.
    """


@dataclass(frozen=True)
class SliceOwned(ArgTransform):
    """Rows -> (n_counted, ...): each atom on exactly one rank, without halo and phantom rows."""


@dataclass(frozen=True)
class AsIs(ArgTransform):
    """The rows as they are, where nvdd would ask for `GatherInputs`: the kernel reads them by receivers alone."""


@dataclass(frozen=True)
class ScatterOutputs(OutputTransform):
    """(n_padded, ...) whose halo rows are partial sums -> sums at their owners, in the policy's rows."""


@dataclass(frozen=True)
class AllReduceSum(OutputTransform):
    """This rank's share of a sum -> the sum over ranks, a per-system value. Its adjoint is a broadcast."""


@dataclass(frozen=True)
class SliceOutputsOwned(OutputTransform):
    """(n_padded, ...), or (n_global + 1, ...) after `GatherInputsFull` -> (n_owned, ...).

    For kernels that gather, multiply and scatter in one go: all edges into owned rows are here, so these are complete.
    """


TRANSFORMS: dict[str, type] = {
    t.__name__: t
    for t in (GatherInputs, GatherInputsFull, SliceOwned, AsIs, ScatterOutputs, AllReduceSum, SliceOutputsOwned)
}
