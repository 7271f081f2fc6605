"""What a model needs from the framework, as data: storage, outputs, how forces come about."""

from nvdd.specs.outputs import OutputKind, OutputSpec, Reduce
from nvdd.specs.presets import SPEC_LJ_HALO, SPEC_MPNN_HALO
from nvdd.specs.spec import DistributionSpec, ForceStrategy, MLIPSpec

__all__ = [
    "SPEC_LJ_HALO",
    "SPEC_MPNN_HALO",
    "DistributionSpec",
    "ForceStrategy",
    "MLIPSpec",
    "OutputKind",
    "OutputSpec",
    "Reduce",
]
