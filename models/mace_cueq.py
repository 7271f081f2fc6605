"""MACE with cuEquivariance's kernels (https://github.com/NVIDIA/cuEquivariance): conversion, and the fused convolution.

MACE's convolution then is one kernel that gathers senders, multiplies and sums over receivers. It stays whole over ranks:
halo rows of the features are fetched before it, and the edges of owned receivers are all here, so that its sums are
complete. On CPUs, and where ``cuequivariance_ops_torch`` is missing, cuEquivariance computes in plain torch, nothing is
fused, and dispatch sees gather and sum.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nvdd.context import current_dd_context
from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.building import building
from nvdd.roles import Role
from nvdd.shard_tensor import ShardTensor, to_local
from nvdd.specs import MLIPSpec
from nvdd.verbs import distributed_method, refresh_neighbors, scatter_to_owners

_INSTALL = "pip install cuequivariance-torch cuequivariance-ops-torch-cu12 (or -cu13, as torch's CUDA is)"
# The implementations behind `cuequivariance_torch.SegmentedPolynomial`: module, class. MACE calls that one's forward by a
# reference of its own, so that what is adapted is what it calls in turn.
_KERNELS = (
    ("cuequivariance_torch.primitives.segmented_polynomial_uniform_1d", "SegmentedPolynomialFromUniform1dJit"),
    ("cuequivariance_torch.primitives.segmented_polynomial_naive", "SegmentedPolynomialNaive"),
)


def is_fused(module: torch.nn.Module) -> bool:
    """Whether the convolutions of a MACE model are cuEquivariance's, with gather and sum inside."""
    blocks = [block for block in module.interactions if hasattr(block, "conv_fusion")]
    return bool(blocks) and all(_is_cueq(b.conv_tp) for b in blocks)


def convert(module: torch.nn.Module, fused: bool | None = None) -> torch.nn.Module:
    """The model with cuEquivariance's parts and the same weights, as MACE's own ``mace_e3nn_to_cueq`` has them.

    Args:
        module: a model of e3nn's parts.
        fused: whether convolutions are one kernel; None: where there is a GPU and ``cuequivariance_ops_torch``.

    Raises:
        MissingDependencyError: cuequivariance-torch is missing.
        InputError: MACE can't describe the model, or it has cuEquivariance's parts already.
    """
    from mace.cli.convert_e3nn_cueq import transfer_weights
    from mace.tools.scripts_utils import extract_config_mace_model

    _import()
    if has_parts(module):
        raise InputError("this MACE model has cuEquivariance's parts already; leave enable_cueq out")
    described = extract_config_mace_model(module)
    if "error" in described:
        raise InputError(f"enable_cueq: MACE can't tell how this model was made ({described['error']})")
    degree, layers = described["correlation"], described["num_interactions"]
    reduced, irreps = described.get("use_reduced_cg", True), described.get("keep_last_layer_irreps", False)
    with building(next(module.parameters()).dtype):
        made = type(module)(**(described | {"cueq_config": configuration(fused)})).to(next(module.parameters()).device)
        transfer_weights(module, made, len(described["hidden_irreps"].slices()) - 1, degree, layers, reduced, irreps)
    return made.eval()


def configuration(fused: bool | None = None) -> Any:
    """What MACE builds a model of cuEquivariance's parts with; ``fused`` as for `convert`."""
    _import()
    from mace.modules.wrapper_ops import CuEquivarianceConfig

    fused = _has_kernels() if fused is None else fused
    return CuEquivarianceConfig(enabled=True, layout="ir_mul", group="O3_e3nn", optimize_all=True, conv_fusion=fused)


def has_parts(module: torch.nn.Module) -> bool:
    """Whether a MACE model has cuEquivariance's parts, fused or not."""
    return any(_is_cueq(part) for part in module.modules())


def keep_weights_only(module: torch.nn.Module) -> None:
    """Leaves cuEquivariance's tables out of ``state_dict``: which there are depends on the machine's kernels, and they follow
    from the model's configuration."""
    for part in module.modules():
        if _is_cueq(part):
            for inner in part.modules():
                inner._non_persistent_buffers_set.update(inner._buffers)


def _is_cueq(part: torch.nn.Module) -> bool:
    return type(part).__module__.startswith("cuequivariance_torch")


def restore(module: torch.nn.Module) -> None:
    """Gives the fused convolutions of a MACE model that comes from a file or another process MACE's way of calling them.

    cuEquivariance's pickles don't keep it.

    Raises:
        MissingDependencyError: the kernels are missing here.
    """
    from mace.modules.wrapper_ops import with_cueq_conv_fusion

    for block in module.interactions:
        if hasattr(block, "conv_fusion") and "forward" not in vars(block.conv_tp):
            try:
                with_cueq_conv_fusion(block.conv_tp)
            except AttributeError:
                raise MissingDependencyError(
                    f"this MACE model was made with cuEquivariance's fused kernels, which are missing here: {_INSTALL}; or "
                    "take the e3nn model"
                ) from None


def with_adapters(spec: MLIPSpec) -> MLIPSpec:
    """The spec of a model with fused convolutions."""
    from nvdd.adapters import MethodAdapter

    return spec.with_adapters(
        *(
            MethodAdapter(module_path=path, class_name=name, method_name="forward", replacement=convolve)
            for path, name in _KERNELS
        )
    )


@distributed_method
def convolve(
    original: Callable,
    module: torch.nn.Module,
    inputs: list[Tensor],
    input_indices: dict[int, Tensor],
    output_shapes: dict[int, Tensor],
    output_indices: dict[int, Tensor],
) -> list[Tensor]:
    """A segmented polynomial over edges: what is read by senders gets its halo rows, sums over receivers are complete.

    Without indices of edges it works row by row, and dispatch sees what becomes of it.
    """
    if type(module).__name__ == _KERNELS[0][1] and not inputs[0].is_cuda:
        raise InputError(
            "this MACE model has cuEquivariance's fused kernels, which run on NVIDIA GPUs, and its ranks compute on "
            f"{inputs[0].device}; give device='cuda', or take the e3nn model (without enable_cueq)"
        )
    over_edges = [i for i in (*input_indices.values(), *output_indices.values()) if isinstance(i, ShardTensor)]
    if not over_edges:
        return original(module, inputs, input_indices, output_shapes, output_indices)
    if any(i._role not in (Role.SENDER, Role.RECEIVER) for i in over_edges):
        raise InputError(f"a segmented polynomial is indexed by {sorted({i._role.value for i in over_edges})}")
    read = {k for k, i in input_indices.items() if getattr(i, "_role", None) is Role.SENDER}
    rows = [to_local(refresh_neighbors(x, pad=True)) if k in read else to_local(x) for k, x in enumerate(inputs)]
    if any(getattr(i, "_role", None) is Role.SENDER for i in output_indices.values()):
        raise InputError("a segmented polynomial that sums over senders is not distributed; MACE sums over receivers")
    local = lambda values: {k: to_local(v) for k, v in values.items()}
    sums = original(module, rows, local(input_indices), local(output_shapes), local(output_indices))
    return [_complete(s) if k in output_indices else s for k, s in enumerate(sums)]


def _complete(sums: Tensor) -> Tensor:
    """Sums over edges of owned receivers, in the policy's rows."""
    return sums if current_dd_context().meta.fetches else to_local(scatter_to_owners(sums))


def _has_kernels() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("cuequivariance_ops_torch") is not None


def _import() -> None:
    try:
        import cuequivariance_torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"enable_cueq needs cuequivariance-torch: {_INSTALL}") from error
