"""MACE and SevenNet with cuEquivariance's parts on the CPU, fused convolutions included."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from builders import random_mace
from nvdd.models import mace_cueq
from nvdd.models.building import building
from nvdd.models.mace import MACEWrapper
from nvdd.models.sevenn import SevenNetWrapper


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


def small_sevennet(fused: bool) -> SevenNetWrapper:
    """A SevenNet with random weights, float64, the same of both kinds; 7net-0 takes minutes to build in plain torch."""
    from sevenn.checkpoint import SevenNetCheckpoint
    from sevenn.model_build import build_E3_equivariant_model

    from nvdd.models import sevenn, sevenn_fused

    shipped = SevenNetCheckpoint(sevenn._find("7net-0")).config
    size = {"channel": 4, "lmax": 1, "lmax_edge": 1, "lmax_node": 1, "num_convolution_layer": 2}
    config = {**shipped, **size, "irreps_manual": False, "conv_denominator": [30.0, 30.0]}
    with building(torch.float32), contextlib.redirect_stdout(io.StringIO()):
        torch.manual_seed(0)
        plain = SevenNetWrapper(build_E3_equivariant_model(dict(config)))
    plain.use("enable_cueq")
    if not fused:
        return plain.to(torch.float64).eval().requires_grad_(False)
    with sevennet_kernels_in_plain_torch(), building(torch.float32):
        made = SevenNetWrapper(build_E3_equivariant_model(sevenn_fused.configured(config, "enable_cueq")))
    made.checkpoint_config = config
    made.use("enable_cueq")
    made.load_state_dict(plain.state_dict())
    return made.to(torch.float64).eval().requires_grad_(False)


@contextmanager
def sevennet_kernels_in_plain_torch() -> Iterator[None]:
    """SevenNet takes cuEquivariance's plain implementation, which it offers as a method, and finds no GPU missing."""
    with (
        mock.patch("sevenn.nn.cue_helper.is_cue_available", lambda: True),
        mock.patch.dict(os.environ, CUEQ_TP_METHOD="naive"),
    ):
        yield
