"""AIMNet2 over ranks: what stands in for the places where aimnet's code reads neighbours or sums over a system.

aimnet lays atoms out as ``[atoms | dummy]`` with a dense matrix of neighbours, in which the dummy's row fills up.
Here rows are ``[owned | dummy | halo]``: per-atom tensors end with the dummy, and only what is read by the matrix gets
halo rows behind it. A row of the matrix has all neighbours of an owned atom, so nothing is sent back in the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nvdd.context import current_dd_context
from nvdd.exchange import broadcast, sum_over_ranks
from nvdd.shard_tensor import to_local
from nvdd.specs import DistributionSpec, MLIPSpec, OutputKind, OutputSpec
from nvdd.specs.presets import SPEC_MPNN_HALO
from nvdd.verbs import distributed_method, refresh_neighbors


def with_halo(x: Tensor) -> Tensor:
    """``[owned | dummy]`` (n_owned + 1, ...) -> ``[owned | dummy | halo]``; as it is in a single process."""
    context = current_dd_context()
    if context is None or context.world_size == 1:
        return x
    n = context.n_owned
    padded = to_local(refresh_neighbors(x[:n], pad=True))
    return torch.cat([padded[:n], x[n:], padded[n:]])


def dense_rows(senders: Tensor, n_owned: int) -> Tensor:
    """Rows of senders in ``[owned | dummy | halo]`` from those in ``[owned | halo]``."""
    return senders + (senders >= n_owned)


@distributed_method
def convolve(original: Callable, self: Any, data: dict[str, Tensor], a: Tensor) -> Tensor:
    """For ``ConvSV.forward``: neighbours' features come with halo rows, the rest is aimnet's."""
    a, rows, geometry = with_halo(a), data["nbmat"], data["g_sv"]
    if _has_kernel(self, a, geometry):
        from aimnet.kernels import conv_sv_2d_sp

        n_owned = len(rows) - 1
        # to the kernel padding is what has the largest row
        rows = torch.where(rows == n_owned, len(a) - 1, rows - (rows > n_owned).to(rows.dtype))
        a = torch.cat([a[:n_owned], a[n_owned + 1 :], a[n_owned : n_owned + 1]])
        gathered = conv_sv_2d_sp(a, rows, geometry, padding_value=len(a) - 1, num_centers=n_owned)
    else:
        neighbours = a.index_select(0, rows.flatten()).unflatten(0, rows.shape)
        gathered = torch.einsum(
            "...mag,...mgd->...agd" if self.d2features else "...ma,...mgd->...agd", neighbours, geometry
        )
    return self._finish_convolution(data, gathered, 1)


def _has_kernel(convolution: Any, a: Tensor, geometry: Tensor) -> bool:
    if not (convolution.d2features and a.is_cuda and a.dtype == geometry.dtype == torch.float32):
        return False
    from aimnet.modules.aev import WARP_CUDA_AVAILABLE

    return WARP_CUDA_AVAILABLE


def mol_sum(x: Tensor, data: dict[str, Tensor]) -> Tensor:
    """For ``nbops.mol_sum``: (n_owned + 1, ...) -> (n_systems, ...) sums over the atoms of all ranks.

    aimnet gives the sums to atoms again, so the gradient of each is that of all ranks' atoms.
    """
    context = current_dd_context()
    n = context.n_counted
    share = x.new_zeros(context.n_systems, *x.shape[1:]).index_add(0, data["mol_idx"][:n], x[:n])
    return broadcast(sum_over_ranks(share, context.comm, "sum over a molecule"), context.comm, "sum over a molecule")


def get_ij(x: Tensor, data: dict[str, Tensor], suffix: str = "") -> tuple[Tensor, Tensor]:
    """For ``nbops.get_ij``: a per-atom tensor at both ends of each pair."""
    rows = data["nbmat"]
    return x.unsqueeze(1), with_halo(x).index_select(0, rows.flatten()).unflatten(0, rows.shape)


def calc_distances(data: dict[str, Tensor], suffix: str = "", pad_value: float = 1.0) -> tuple[Tensor, Tensor]:
    """For ``ops.calc_distances``: the vectors are there, no positions need be read."""
    vectors = data["shifts"].masked_fill(data["mask_ij"].unsqueeze(-1), pad_value)
    return torch.linalg.vector_norm(vectors, dim=-1), vectors


def spec(open_shell: bool) -> MLIPSpec:
    """Halo storage with these adapters; charges are per-atom outputs."""
    from nvdd.adapters import MethodAdapter, PythonAdapter

    charges = {"charges": OutputSpec(OutputKind.PER_NODE)}
    if open_shell:
        charges["spin_charges"] = OutputSpec(OutputKind.PER_NODE)
    return (
        MLIPSpec(DistributionSpec(SPEC_MPNN_HALO.distribution.policy), SPEC_MPNN_HALO.outputs, name="aimnet2")
        .with_outputs(charges)
        .with_third_party_helpers(
            PythonAdapter("aimnet.nbops", "mol_sum", mol_sum),
            PythonAdapter("aimnet.nbops", "get_ij", get_ij),
            PythonAdapter("aimnet.ops", "calc_distances", calc_distances),
        )
        .with_adapters(
            MethodAdapter(
                module_path="aimnet.modules.aev", class_name="ConvSV", method_name="forward", replacement=convolve
            )
        )
    )
