"""UMA, eSCN and eSEN over ranks: what stands in for the places where fairchem's code reads other ranks' atoms.

The wrapper hands the backbone its edges, as fairchem does with ``otf_graph=False``, so no rank builds a graph of its own or
computes features of halo atoms. Rows of nodes are owned atoms, and three things cross ranks: the features that edges
read in each layer, the mean composition by which experts are mixed, and sums by which channels are balanced. Between
these the backbone runs on plain tensors. fairchem's own graph parallelism (``gp_utils``) is left as it is, off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nvdd.adapters import MethodAdapter, PythonAdapter
from nvdd.context import current_dd_context
from nvdd.errors import InputError
from nvdd.exchange import broadcast
from nvdd.policy import HaloStoragePolicy
from nvdd.roles import Role
from nvdd.shard_tensor import ShardTensor, promote, to_local
from nvdd.specs import SPEC_MPNN_HALO, SPEC_UMA_HALO, ForceStrategy, MLIPSpec, OutputKind, OutputSpec
from nvdd.verbs import distributed_method, refresh_neighbors, system_sum

_BACKBONE = "fairchem.core.models.uma.escn_md"


@distributed_method
def graph(original: Callable, self: Any, data: Any) -> dict[str, Tensor]:
    """For ``eSCNMDBackbone._generate_graph``: species of halo rows join in, which edges read by their senders.

    These are the names that fairchem uses for it when it divides atoms itself.
    """
    found = original(self, data)
    data["atomic_numbers_full"] = data["numbers_of_edges"]
    return found


@distributed_method
def edgewise(original: Callable, self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """For ``Edgewise.forward``: features come with halo rows, fetched once, before edges are taken in chunks.

    Receivers are owned, so that owned rows of the result are complete and others are nobody's.
    """
    rows = x.shape[0]
    return original(self, to_local(refresh_neighbors(x, pad=True)), *args, **kwargs)[:rows]


@distributed_method
def mixing(original: Callable, self: Any, atomic_numbers_full: Tensor, batch_full: Tensor, csd_mixed_emb: Tensor) -> None:
    """For ``set_MOLE_coefficients``: the composition of a system is the mean over its atoms on all ranks."""
    meta = current_dd_context().meta
    numbers = promote(atomic_numbers_full, Role.OWNED, meta)
    original(self, numbers, promote(batch_full, Role.SYSTEM_INDEX, meta, entry=Role.OWNED), csd_mixed_emb)
    if self.num_experts and isinstance(mixed := self.global_mole_tensors.expert_mixing_coefficients, ShardTensor):
        # the same on every rank, for edges that each has of its own
        mixed = broadcast(to_local(mixed), meta.comm, "mixture of experts")
        self.global_mole_tensors.expert_mixing_coefficients = mixed


def balance_channels(
    emb: Tensor, target: Tensor, natoms: Tensor, batch: Tensor, start_idx: int, end_idx: int, target_offset: float = 0.0
) -> Tensor:
    """For ``balance_channels_batched``: channels of (n_owned, ...) are shifted so that all ranks' atoms sum to ``target``."""
    channels = emb[:, 0, start_idx:end_idx]
    comm = current_dd_context().comm
    total = broadcast(to_local(system_sum(channels, batch, len(natoms))), comm, "balance of channels")
    excess = (total - (target - target_offset).unsqueeze(1)) / natoms.unsqueeze(1)
    balanced = emb.clone()
    balanced[:, 0, start_idx:end_idx] = channels - excess[batch]
    return balanced


def unturned(edge_distance_vec: Tensor, lmax: int, gamma: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """For ``axis_angle_wigner_hybrid``: each edge's frame without the random turn about the edge.

    Energies don't depend on it (layers are equivariant under these turns), but it would take torch's random numbers, and
    no two calls would agree in the last digits.
    """
    from fairchem.core.models.uma.common.quaternion.wigner_d_hybrid import axis_angle_wigner_hybrid

    if gamma is None:
        gamma = edge_distance_vec.new_zeros(len(edge_distance_vec))
    return axis_angle_wigner_hybrid(edge_distance_vec, lmax, gamma=gamma, **kwargs)


def spec(direct: bool) -> MLIPSpec:
    """Halo storage of owned rows with these adapters; of a model with ``direct`` forces these are outputs.

    Edges are handed to the model, so `SPEC_UMA_HALO` is used with `SPEC_MPNN_HALO`'s rows and derivative: no features of
    halo atoms, forces and stress from edge vectors.
    """

    def method(class_name: str, name: str, body: Callable, module: str = _BACKBONE) -> MethodAdapter:
        return MethodAdapter(module_path=module, class_name=class_name, method_name=name, replacement=body)

    made = (
        SPEC_UMA_HALO.with_policy(SPEC_MPNN_HALO.distribution.policy)
        .with_force_strategy(ForceStrategy.DIRECT if direct else ForceStrategy.EDGE_VECTORS)
        .with_adapters(
            method("eSCNMDBackbone", "_generate_graph", graph),
            method("Edgewise", "forward", edgewise, "fairchem.core.models.uma.escn_md_block"),
            method("eSCNMDMoeBackbone", "set_MOLE_coefficients", mixing, "fairchem.core.models.uma.escn_moe"),
            PythonAdapter(_BACKBONE, "balance_channels_batched", balance_channels),
            PythonAdapter(_BACKBONE, "axis_angle_wigner_hybrid", unturned),
        )
        .with_name("uma")
    )
    return made if direct else made.with_outputs(stresses=OutputSpec(OutputKind.PER_NODE))


def check_spec(given: MLIPSpec, direct: bool) -> None:
    """Raises InputError for a spec by which the backbone, on plain tensors and unseen, would read no other rank's atoms."""
    policy, there = given.distribution.policy, set(given.all_adapters)
    missing = [adapter.target for adapter in spec(direct).adapters if adapter not in there]
    if missing or (isinstance(policy, HaloStoragePolicy) and not policy.fetches):
        raise InputError(
            f"uma: the spec {given.name!r} lacks the adapters by which UMA reads other ranks' atoms ({', '.join(missing) or 'none'}), "
            f"or keeps halo rows ({policy}); leave spec= out, or change the wrapper's own, wrapper.distribution_spec()"
        )
