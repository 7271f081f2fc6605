"""Specs that fit whole families of models. Start from one, and add what is missing by ``with_...``."""

from __future__ import annotations

from nvdd import mesh, plane_waves
from nvdd.adapters import AllReduceSum, OpAdapter, SliceOwned
from nvdd.policy import GraphParallelPolicy, HaloStoragePolicy
from nvdd.roles import Role
from nvdd.specs.compiling import ForceStrategy
from nvdd.specs.distribution import DistributionSpec
from nvdd.specs.outputs import OutputKind, OutputSpec
from nvdd.specs.spec import MLIPSpec

_ENERGY_OUTPUTS = {
    "energy": OutputSpec(OutputKind.PER_GRAPH),
    "energies": OutputSpec(OutputKind.PER_NODE),
    "forces": OutputSpec(OutputKind.PER_NODE),
    "stress": OutputSpec(OutputKind.PER_GRAPH),
    "stresses": OutputSpec(OutputKind.PER_NODE),
}
# where energies are not sums over pairs, stress has no share for each atom
_WITHOUT_STRESSES = {name: output for name, output in _ENERGY_OUTPUTS.items() if name != "stresses"}
_FETCH = HaloStoragePolicy(scatter_mode="local", gather_mode="halo_fetch")

#: Owned rows, halo rows fetched where senders are gathered: message-passing models (MACE, SevenNet, NequIP, ...)
SPEC_MPNN_HALO = MLIPSpec(DistributionSpec(_FETCH), _ENERGY_OUTPUTS, name="SPEC_MPNN_HALO")

#: The same layout for pair potentials, whose kernels read edge vectors and species and no remote features
SPEC_LJ_HALO = MLIPSpec(DistributionSpec(_FETCH), _ENERGY_OUTPUTS, name="SPEC_LJ_HALO")

#: Message passing with atoms divided by index: geometry on every rank, features gathered in each layer
SPEC_MPNN_GP = MLIPSpec(DistributionSpec(GraphParallelPolicy()), _ENERGY_OUTPUTS, name="SPEC_MPNN_GP")

#: Models that build their own graph from positions of owned and halo atoms (UMA, eSCN): messages to halo rows are theirs
SPEC_UMA_HALO = MLIPSpec(
    DistributionSpec(HaloStoragePolicy(scatter_mode="local", gather_mode="halo_read")),
    _WITHOUT_STRESSES,
    force_strategy=ForceStrategy.POSITIONS,
    name="SPEC_UMA_HALO",
)

# arguments of nvdd's own operations that have one row for each atom that counts
_EACH_ATOM_ONCE = {position: SliceOwned() for position in range(4)}

#: Pairs in real space, and structure factors that are sums over all atoms: functions of positions
SPEC_EWALD_HALO = MLIPSpec(
    DistributionSpec(
        _FETCH,
        custom_ops=(
            OpAdapter(plane_waves.structure_factors, _EACH_ATOM_ONCE, {0: AllReduceSum()}),
            OpAdapter(plane_waves.plane_wave_potential, {0: SliceOwned(), 2: SliceOwned()}, output_roles={0: Role.OWNED}),
        ),
    ),
    _WITHOUT_STRESSES,
    force_strategy=ForceStrategy.POSITIONS,
    name="SPEC_EWALD_HALO",
)

#: The same with charges spread on a mesh, which is summed over ranks
SPEC_PME_HALO = MLIPSpec(
    DistributionSpec(
        _FETCH,
        custom_ops=(
            OpAdapter(mesh.spread_on_mesh, _EACH_ATOM_ONCE, {0: AllReduceSum()}),
            OpAdapter(mesh.read_off_mesh, {0: SliceOwned(), 2: SliceOwned()}, output_roles={0: Role.OWNED}),
        ),
    ),
    _WITHOUT_STRESSES, force_strategy=ForceStrategy.POSITIONS, name="SPEC_PME_HALO"
)

#: Dispersion: coordination numbers of neighbours are fetched, nothing is global
SPEC_DFTD3_HALO = MLIPSpec(DistributionSpec(_FETCH), _ENERGY_OUTPUTS, name="SPEC_DFTD3_HALO")
