"""nvdd: machine-learning interatomic potentials over many ranks.

Everything that a user or a model author needs is importable from here; each name is loaded when first used, so
``import nvdd`` costs nothing but its own few lines.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# public name -> module that defines it
_PUBLIC = {
    "AtomicData": "nvdd.data",
    "Batch": "nvdd.data",
    "EdgeLayout": "nvdd.model_config",
    "ModelConfig": "nvdd.model_config",
    "NeighborConfig": "nvdd.model_config",
    "NeighborListFormat": "nvdd.model_config",
    "BaseModelMixin": "nvdd.models.base",
    "ModelOutputs": "nvdd.models.base",
    "CommunicationError": "nvdd.errors",
    "DistributedOpError": "nvdd.errors",
    "InputError": "nvdd.errors",
    "MissingDependencyError": "nvdd.errors",
    "NvddError": "nvdd.errors",
    "RankError": "nvdd.errors",
    "CompilePolicy": "nvdd.specs",
    "DistributionSpec": "nvdd.specs",
    "ForceStrategy": "nvdd.specs",
    "MLIPSpec": "nvdd.specs",
    "OutputKind": "nvdd.specs",
    "OutputSpec": "nvdd.specs",
    "Reduce": "nvdd.specs",
    "SPEC_DFTD3_HALO": "nvdd.specs",
    "SPEC_EWALD_HALO": "nvdd.specs",
    "SPEC_LJ_HALO": "nvdd.specs",
    "SPEC_MPNN_GP": "nvdd.specs",
    "SPEC_MPNN_HALO": "nvdd.specs",
    "SPEC_PME_HALO": "nvdd.specs",
    "SPEC_UMA_HALO": "nvdd.specs",
    "SpecConflictError": "nvdd.specs",
    "GraphParallelPolicy": "nvdd.policy",
    "HaloStoragePolicy": "nvdd.policy",
    "LocalStoragePolicy": "nvdd.policy",
    "ShardedStoragePolicy": "nvdd.policy",
    "StoragePolicy": "nvdd.policy",
    "Communicator": "nvdd.communicator",
    "IndexPartitioner": "nvdd.index_partition",
    "SpatialPartitioner": "nvdd.partition",
    "ExchangePlan": "nvdd.plan",
    "Role": "nvdd.roles",
    "ShardTensor": "nvdd.shard_tensor",
    "to_local": "nvdd.shard_tensor",
    "dispatch_trace": "nvdd.trace",
    "COOPadder": "nvdd.padding",
    "DenseBatchPadder": "nvdd.padding",
    "DensePadder": "nvdd.padding",
    "GraphPadder": "nvdd.padding",
    "resolve_cap": "nvdd.padding",
    "DomainConfig": "nvdd.config",
    "StrategyKind": "nvdd.config",
    "DistributedModel": "nvdd.runtime.model",
    "DistributedPipelineModel": "nvdd.runtime.pipeline",
    "PipelineModelWrapper": "nvdd.models.pipeline",
    "AdapterRegistry": "nvdd.adapters",
    "AdapterStatus": "nvdd.adapters",
    "AllReduceSum": "nvdd.adapters",
    "AsIs": "nvdd.adapters",
    "FunctionAdapter": "nvdd.adapters",
    "GatherInputs": "nvdd.adapters",
    "GatherInputsFull": "nvdd.adapters",
    "JitAdapter": "nvdd.adapters",
    "MethodAdapter": "nvdd.adapters",
    "AtomStage": "nvdd.adapters",
    "EdgeStage": "nvdd.adapters",
    "OpAdapter": "nvdd.adapters",
    "PythonAdapter": "nvdd.adapters",
    "ScatterOutputs": "nvdd.adapters",
    "SliceOutputsOwned": "nvdd.adapters",
    "SliceOwned": "nvdd.adapters",
    "DDContext": "nvdd.context",
    "current_dd_context": "nvdd.context",
    "Scope": "nvdd.verbs",
    "autograd_target": "nvdd.verbs",
    "distributed_method": "nvdd.verbs",
    "entries_at": "nvdd.verbs",
    "localize": "nvdd.verbs",
    "neighbor_refresh_adapters": "nvdd.verbs",
    "gather_atoms": "nvdd.verbs",
    "refresh_neighbors": "nvdd.verbs",
    "scatter_to_owners": "nvdd.verbs",
    "sum_over_edges": "nvdd.edge_sums",
    "system_sum": "nvdd.verbs",
    "ParticleHaloConfig": "nvdd.halo",
    "reshard_by_destination": "nvdd.reshard",
    "trace_and_validate": "nvdd.validate",
    "estimate": "nvdd.planning.estimate",
    "BaseDynamics": "nvdd.dynamics.base",
    "DomainParallel": "nvdd.dynamics.domain_parallel",
    "DynamicsState": "nvdd.dynamics.state",
    "Hook": "nvdd.dynamics.hooks",
    "HookScope": "nvdd.dynamics.hooks",
    "ShardedBatch": "nvdd.dynamics.sharded_batch",
    "CellRelaxation": "nvdd.dynamics.cell_relaxation",
    "CSVR": "nvdd.dynamics.velocity_rescale",
    "FIRE": "nvdd.dynamics.fire",
    "FIRE2": "nvdd.dynamics.fire",
    "LBFGS": "nvdd.dynamics.lbfgs",
    "Langevin": "nvdd.dynamics.langevin",
    "NPH": "nvdd.dynamics.npt",
    "NPT": "nvdd.dynamics.npt",
    "NVE": "nvdd.dynamics.verlet",
    "NoseHoover": "nvdd.dynamics.nose_hoover",
    "Simulation": "nvdd.dynamics.single",
    "VelocityRescale": "nvdd.dynamics.velocity_rescale",
    "draw_velocities": "nvdd.dynamics.velocities",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'nvdd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
