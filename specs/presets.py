"""Specs that fit whole families of models."""

from __future__ import annotations

from nvdd.policy import HaloStoragePolicy
from nvdd.specs.outputs import OutputKind, OutputSpec
from nvdd.specs.spec import DistributionSpec, ForceStrategy, MLIPSpec

_ENERGY_OUTPUTS = {
    "energy": OutputSpec(OutputKind.PER_GRAPH),
    "energies": OutputSpec(OutputKind.PER_NODE),
    "forces": OutputSpec(OutputKind.PER_NODE),
    "stress": OutputSpec(OutputKind.PER_GRAPH),
    "stresses": OutputSpec(OutputKind.PER_NODE),
}

# Owned rows, halo rows fetched where senders are gathered: message-passing models (MACE, SevenNet, NequIP, ...)
SPEC_MPNN_HALO = MLIPSpec(
    DistributionSpec(HaloStoragePolicy(scatter_mode="local", gather_mode="halo_fetch")),
    _ENERGY_OUTPUTS,
    force_strategy=ForceStrategy.EDGE_VECTORS,
    name="SPEC_MPNN_HALO",
)

# The same layout for pair potentials, whose kernels read edge vectors and species and no remote features
SPEC_LJ_HALO = MLIPSpec(
    DistributionSpec(HaloStoragePolicy(scatter_mode="local", gather_mode="halo_fetch")),
    _ENERGY_OUTPUTS,
    force_strategy=ForceStrategy.EDGE_VECTORS,
    name="SPEC_LJ_HALO",
)
