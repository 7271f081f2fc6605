"""What a model needs from the framework, as data: storage, adapters, outputs, how forces come about."""

from nvdd.adapters import (
    AdapterRegistry,
    AdapterStatus,
    AtomStage,
    EdgeStage,
    FunctionAdapter,
    JitAdapter,
    MethodAdapter,
    OpAdapter,
    PythonAdapter,
)
from nvdd.specs.compiling import CompilePolicy, ForceStrategy
from nvdd.specs.distribution import DistributionSpec
from nvdd.specs.merge import SpecConflictError
from nvdd.specs.outputs import OutputKind, OutputSpec, Reduce
from nvdd.specs.presets import (
    SPEC_DFTD3_HALO,
    SPEC_EWALD_HALO,
    SPEC_LJ_HALO,
    SPEC_MPNN_GP,
    SPEC_MPNN_HALO,
    SPEC_PME_HALO,
    SPEC_UMA_HALO,
)
from nvdd.specs.spec import MLIPSpec

__all__ = [
    "SPEC_DFTD3_HALO",
    "SPEC_EWALD_HALO",
    "SPEC_LJ_HALO",
    "SPEC_MPNN_GP",
    "SPEC_MPNN_HALO",
    "SPEC_PME_HALO",
    "SPEC_UMA_HALO",
    "AdapterRegistry",
    "AdapterStatus",
    "AtomStage",
    "CompilePolicy",
    "DistributionSpec",
    "EdgeStage",
    "ForceStrategy",
    "FunctionAdapter",
    "JitAdapter",
    "MLIPSpec",
    "MethodAdapter",
    "OpAdapter",
    "OutputKind",
    "OutputSpec",
    "PythonAdapter",
    "Reduce",
    "SpecConflictError",
]
