"""MACE with cuEquivariance's parts on the CPU, fused convolutions included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from builders import random_mace
from nvdd.models import mace_cueq
from nvdd.models.mace import MACEWrapper


def wrapper(fused: bool) -> MACEWrapper:
    """The model ``mace`` of `parity`; with fused convolutions it is called as on a GPU."""
    if not fused:
        return MACEWrapper(mace_cueq.convert(random_mace(), fused=False)).requires_grad_(False)
    with kernels_in_plain_torch():
        return MACEWrapper(mace_cueq.convert(random_mace(), fused=True)).requires_grad_(False)


@contextmanager
def kernels_in_plain_torch() -> Iterator[None]:
    """cuEquivariance's plain implementation has what MACE asks the kernels' one for: the number of weights.

    It has the same call, with indices of senders and receivers, so that all but the kernel is what runs on a GPU.
    """
    from cuequivariance_torch.primitives.segmented_polynomial_naive import SegmentedPolynomialNaive as Plain

    Plain.buffer_num_segments = property(lambda self: [1])
    Plain.operand_extent = property(lambda self: self.input_sizes[0])
    try:
        yield
    finally:
        del Plain.buffer_num_segments, Plain.operand_extent
