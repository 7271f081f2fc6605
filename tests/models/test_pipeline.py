"""PipelineModelWrapper: what it says of itself, its wires, and what it refuses."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import bond_models
import composed
import parity
import toys
from composed import Charges, Coulomb, lj
from nvdd import (
    Batch,
    DistributedModel,
    DistributedOpError,
    DistributedPipelineModel,
    DistributionSpec,
    DomainConfig,
    ForceStrategy,
    GraphParallelPolicy,
    InputError,
    MLIPSpec,
    ModelConfig,
    ModelOutputs,
    NeighborConfig,
    OutputKind,
    OutputSpec,
    PipelineModelWrapper,
    ShardedStoragePolicy,
    SpecConflictError,
)
from nvdd.models.lj import LennardJonesModelWrapper
from nvdd.neighbors import attach_neighbors
from nvdd.wires import Wire

WIRED = {"charges": (0, "charges")}


class Charged(Charges):
    """Whose charges are what ``made`` makes of them."""

    def __init__(self, made) -> None:
        super().__init__()
        self.made = made

    def forward(self, data: Batch) -> ModelOutputs:
        return ModelOutputs(charges=self.made(self.charges(data)))


class Silent(Charges):
    """Forgets what it declares."""

    def forward(self, data: Batch) -> ModelOutputs:
        return ModelOutputs(other=self.charges(data))


class Internal(Coulomb):
    def distribution_spec(self, strategy=None):
        return super().distribution_spec().with_force_strategy(ForceStrategy.MODEL_INTERNAL)


class ByGraph(composed.ChargesWithEnergy):
    def distribution_spec(self, strategy=None):
        return MLIPSpec(DistributionSpec(GraphParallelPolicy()), self.outputs)


class NoSpec(torch.nn.Module):
    model_config = ModelConfig(neighbor_config=NeighborConfig(3.0))


def evaluate(model, wanted=("energy", "forces")):
    return DistributedModel(model)(Batch.from_atoms(parity.structure("triclinic")), wanted)


def test_what_it_says_of_itself():
    mixed = PipelineModelWrapper([lj(4.0), parity.wrapper("mace"), toys.OfPositions()])
    config = mixed.model_config
    assert config.neighbor_config.cutoff == max(4.0, parity.wrapper("mace").model_config.neighbor_config.cutoff)
    assert config.elements == frozenset({8, 14}) and not config.node_inputs
    assert config.outputs == {"energy", "energies", "forces", "stress"}
    assert mixed.distribution_spec().force_strategy is ForceStrategy.POSITIONS
    assert PipelineModelWrapper([lj(4.0), lj(5.0)]).model_config.outputs >= {"stresses"}
    assert PipelineModelWrapper([Charges(), Coulomb()], WIRED).model_config.outputs >= {"energies", "charges"}


def test_types_and_policies():
    two = PipelineModelWrapper([lj(4.0, dtype=torch.float32), lj(5.0)])
    assert two.dtype is torch.float64 and [b.dtype for b in two.composed_of] == [torch.float32, torch.float64]
    sharded = composed.OwnPolicy(ShardedStoragePolicy())
    assert PipelineModelWrapper([lj(4.0), sharded]).distribution_spec().distribution.policy == ShardedStoragePolicy()


def test_inputs_that_no_wire_gives_are_those_of_the_atoms():
    assert PipelineModelWrapper([Coulomb(), lj(3.0)]).model_config.node_inputs == {"charges"}
    assert PipelineModelWrapper([Charges(), Coulomb()], WIRED).model_config.node_inputs == frozenset()
    own = PipelineModelWrapper([composed.ChargesWithEnergy(), Coulomb()], {"charges": None})
    assert own.model_config.node_inputs == {"charges"} and own.wires == ()
    optional = Coulomb()
    optional.model_config.optional_inputs = frozenset({"charges"})
    assert PipelineModelWrapper([optional, lj(3.0)]).model_config.optional_inputs == {"charges"}
    assert PipelineModelWrapper([optional, Coulomb()]).model_config.optional_inputs == frozenset()


def test_wires_to_all_and_to_one():
    blocks = [composed.ChargesWithEnergy(), Coulomb(), Coulomb(4.0)]
    assert PipelineModelWrapper(blocks, WIRED).wires == (Wire(0, "charges", 1, "charges"), Wire(0, "charges", 2, "charges"))
    one = PipelineModelWrapper(blocks, {(2, "charges"): (0, "charges", "fixed"), "charges": None})
    assert one.wires == (Wire(0, "charges", 2, "charges", fixed=True),)


def test_a_copy_and_a_pickle_are_the_same():
    model = composed.pipeline("wired")
    energy = evaluate(model)["energy"]
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(evaluate(again)["energy"], energy)


def test_a_block_of_float32_is_fed_in_float32():
    model = PipelineModelWrapper([Charges(), Coulomb(dtype=torch.float32)], WIRED)
    out, exact = evaluate(model), evaluate(PipelineModelWrapper([Charges(), Coulomb()], WIRED))
    largest = exact["forces"].abs().max()
    assert 0 < (out["forces"] - exact["forces"]).abs().max() < 1e-5 * largest


A, B = r"block 0 \(Charges\)", r"block 1 \(Coulomb\)"
WRONG = {
    "nothing": (lambda: PipelineModelWrapper([]), "needs at least one block"),
    "no wrapper": (lambda: PipelineModelWrapper([lj(3.0), "lj"]), "block 1 of the pipeline is a str, not a model wrapper"),
    "no spec": (lambda: PipelineModelWrapper([NoSpec()]), r"block 0 \(NoSpec\) declares no distribution_spec"),
    "a pipeline in another": (lambda: PipelineModelWrapper([PipelineModelWrapper([lj(3.0)])]), "put its blocks into this one"),
    "no energy": (lambda: PipelineModelWrapper([lj(3.0), Charges()]), r"block 1 \(Charges\) declares no energies or energy"),
    "an input that is predicted": (
        lambda: PipelineModelWrapper([Charges(), Coulomb()]),
        rf"{B} reads 'charges', which {A} predicts: say which it shall have, wires={{'charges': \(0, 'charges'\)}}, or",
    ),
    "an input that nobody reads": (
        lambda: PipelineModelWrapper([Charges(), Coulomb()], WIRED | {"spins": (0, "charges")}),
        r"no block but its source reads 'spins'; blocks read \['charges'\]",
    ),
    "an output that isn't there": (
        lambda: PipelineModelWrapper([Charges(), Coulomb()], {"charges": (0, "q")}),
        rf"'charges' of {B} is wired to 'q' of {A}, whose spec declares \['charges'\]",
    ),
    "an output of one that has none": (
        lambda: PipelineModelWrapper([lj(3.0), Coulomb()], {"charges": (0, "charges")}),
        "whose spec declares no further outputs",
    ),
    "a block that isn't there": (
        lambda: PipelineModelWrapper([Charges(), Coulomb()], {"charges": (2, "charges")}),
        r"is wired to \(2, 'charges'\); write \(block, output\).*from 0 to 1",
    ),
    "a target that isn't there": (
        lambda: PipelineModelWrapper([Charges(), Coulomb()], {(5, "charges"): (0, "charges")}),
        r"wires\[\(5, 'charges'\)\]: write an input's name, or \(block, name\)",
    ),
    "an input of another block": (
        lambda: PipelineModelWrapper([Charges(), Coulomb()], {(0, "charges"): (1, "charges")}),
        rf"{A} reads no inputs, not 'charges'",
    ),
    "itself": (lambda: PipelineModelWrapper([Coulomb(), lj(3.0)], {(0, "charges"): (0, "charges")}), "of the same block"),
    "words": (
        lambda: PipelineModelWrapper([Charges(), Coulomb()], {"charges": (0, "charges", "frozen")}), "or None for the atoms' own"
    ),
    "of a system": (
        lambda: PipelineModelWrapper([toys.Direct(), Coulomb()], {"charges": (0, "dipole")}),
        "is per_node, and 'dipole' of block 0 .* is per_graph: the shapes differ",
    ),
    "into one that differentiates itself": (
        lambda: PipelineModelWrapper([Charges(), Internal()], WIRED), "differentiates inside its forward"
    ),
    "no common element": (
        lambda: PipelineModelWrapper([parity.wrapper("mace"), LennardJonesModelWrapper(epsilon={"Ar": 1}, sigma={"Ar": 1})]),
        r"no element that all blocks know: block 0 \(MACEWrapper\): O, Si; block 1 \(LennardJonesModelWrapper\): Ar",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused(name):
    make, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        make()


def test_a_circle():
    class Both(composed.ChargesWithEnergy):
        def __init__(self):
            super().__init__()
            self.model_config.node_inputs = frozenset({"charges"})

    with pytest.raises(InputError, match=r"in a circle: block 0 reads 'charges' of block 1, block 1 reads 'charges' of block 0"):
        PipelineModelWrapper([Both(), Both()], {(0, "charges"): (1, "charges"), (1, "charges"): (0, "charges")})


def test_policies_that_divide_atoms_in_two_ways():
    with pytest.raises(SpecConflictError, match=r"block 0 \(LennardJonesModelWrapper\) \| block 1 \(ByGraph\): the storage policy"):
        PipelineModelWrapper([lj(3.0), ByGraph()])


@pytest.mark.parametrize(
    "made,message",
    (
        (lambda q: q[:, None], r"has shape \(48, 1\); one number for each atom has the shape \(n_atoms,\): squeeze it"),
        (lambda q: q.detach(), r"does not depend on the geometry .*\(block, output, 'fixed'\)"),
    ),
)
def test_a_wire_that_gives_something_else(made, message):
    model = PipelineModelWrapper([Charged(made), Coulomb()], WIRED)
    with pytest.raises(DistributedOpError, match=r"'charges' of block 0 \(Charged\), which block 1 reads as 'charges'.*" + message):
        evaluate(model)


def test_detached_charges_are_fine_where_no_force_is_asked_for_or_they_are_fixed():
    detached = Charged(lambda q: q.detach())
    energy = evaluate(PipelineModelWrapper([Charges(), Coulomb()], WIRED), {"energy"})["energy"]
    assert torch.equal(evaluate(PipelineModelWrapper([detached, Coulomb()], WIRED), {"energy"})["energy"], energy)
    fixed = PipelineModelWrapper([detached, Coulomb()], {"charges": (0, "charges", "fixed")})
    other = PipelineModelWrapper([Charges(), Coulomb()], {"charges": (0, "charges", "fixed")})
    assert torch.equal(evaluate(fixed)["forces"], evaluate(other)["forces"])


def test_an_output_that_is_not_returned():
    with pytest.raises(DistributedOpError, match=r"which block 1 reads as 'charges', was not returned; it returned \['other'\]"):
        evaluate(PipelineModelWrapper([Silent(), Coulomb()], WIRED))


def test_a_sum_takes_no_spec_of_another():
    model = composed.pipeline("lj + lj")
    DistributedModel(model, spec=model.distribution_spec())
    other = model.distribution_spec().with_outputs(extra=OutputSpec(OutputKind.PER_NODE))
    with pytest.raises(InputError, match="a sum of models takes no spec"):
        DistributedModel(model, spec=other)


def test_names():
    assert len(DistributedPipelineModel(composed.pipeline("lj + lj"), DomainConfig()).blocks) == 2
    with pytest.raises(InputError, match="takes a PipelineModelWrapper, not a LennardJonesModelWrapper"):
        DistributedPipelineModel(lj(3.0))
    with pytest.raises(InputError, match="adapters of its own"):
        _ = DistributedModel(composed.pipeline("lj + lj")).adapters


def test_stresses_where_one_block_has_none():
    model = DistributedModel(composed.pipeline("toy + positions"))
    assert "stresses" not in model.available_outputs
    with pytest.raises(InputError, match=r"outputs \['stresses'\] are not among"):
        evaluate(composed.pipeline("toy + positions"), {"stresses"})


# -- blocks that return other than the framework expects


class ReturnsForces(composed.ChargesWithEnergy):
    """Returns its forces itself, but no stress."""

    outputs = composed.ChargesWithEnergy.outputs | {"forces": composed.PER_NODE}

    def forward(self, data: Batch) -> ModelOutputs:
        out = super().forward(data)
        (pair,) = torch.autograd.grad(out["energies"].sum(), data.edge_vectors, retain_graph=True)
        zero = torch.zeros(data.n_atoms, 3, dtype=pair.dtype)
        out["forces"] = zero.index_add(0, data.receivers, pair).index_add(0, data.senders, -pair).detach()
        return out


class NoEnergyAfterAll(composed.ChargesWithEnergy):
    def forward(self, data: Batch) -> ModelOutputs:
        return ModelOutputs(charges=self.charges(data))


class OfDetached(Coulomb):
    def forward(self, data: Batch) -> ModelOutputs:
        data._edge_vectors = data.edge_vectors.detach()
        return super().forward(data)


class Voigt(toys.Direct):
    """Six numbers, or nine in a row."""

    def __init__(self, columns) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, data: Batch) -> ModelOutputs:
        out = super().forward(data)
        out["stress"] = out["stress"].reshape(data.n_systems, 9)[:, self.columns]
        return out


@pytest.mark.parametrize("wanted", ({"forces"}, {"forces", "stress"}, {"stress"}))
def test_forces_of_a_block_that_returns_them_count_once_beside_what_goes_through_wires(wanted):
    expected = evaluate(PipelineModelWrapper([composed.ChargesWithEnergy(), Coulomb()], WIRED), wanted)
    found = evaluate(PipelineModelWrapper([ReturnsForces(), Coulomb()], WIRED), wanted)
    for name in wanted:
        assert (found[name] - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max()


def test_an_energy_that_is_declared_and_not_returned():
    with pytest.raises(DistributedOpError, match=r"block 0 \(NoEnergyAfterAll\) returned \['charges'\]: neither 'energies' nor"):
        evaluate(PipelineModelWrapper([NoEnergyAfterAll(), Coulomb()], WIRED), {"energy"})


def test_a_block_that_reads_a_wire_must_depend_on_the_geometry_too():
    model = PipelineModelWrapper([Charges(), OfDetached()], WIRED)
    with pytest.raises(DistributedOpError, match=r"block 1 \(OfDetached\): the energy does not depend on the geometry"):
        evaluate(model)
    assert torch.isfinite(evaluate(model, {"energy"})["energy"]).all()


@pytest.mark.parametrize("columns,shape", (([0, 4, 8, 5, 2, 1], r"\(1, 6\)"), (list(range(9)), r"\(1, 9\)")))
def test_a_stress_of_another_shape(columns, shape):
    with pytest.raises(DistributedOpError, match=rf"the stress that block 1 \(Voigt\) returned has shape {shape}; it must be \(1, 3, 3\)"):
        evaluate(PipelineModelWrapper([lj(4.0), Voigt(columns)]), {"stress"})


def test_without_a_volume_there_is_no_stress_and_no_virial_of_one():
    free = parity.structure("triclinic").copy()
    free.pbc, free.cell = False, np.zeros((3, 3))
    model = composed.pipeline("direct + lj")
    with pytest.raises(InputError, match="the model returns stress itself, of which a virial needs the volume"):
        DistributedModel(model)(Batch.from_atoms(free), {"virial"})
    batch = attach_neighbors(Batch.from_atoms(free), model.model_config.neighbor_config.cutoff, model.edge_layout)
    assert {"energies", "forces"} <= model(batch).keys() and "stress" not in model(batch)


# -- pair forces, as LAMMPS takes them


@pytest.mark.parametrize("skin", (0.0, 1.0))
def test_pair_forces_of_two_cutoffs(skin):
    """Of a graph with a skin the edges are not the candidates."""
    atoms = parity.structure("triclinic")
    model = DistributedModel(composed.pipeline("lj + lj"), DomainConfig(skin=skin))
    batch = Batch.from_atoms(atoms)
    graph = model.graphs.update(batch)
    pair = model.shares(batch, graph, {"pair_forces"})["pair_forces"]
    forces = torch.zeros(len(atoms), 3, dtype=pair.dtype)
    forces.index_add_(0, graph.receiver, pair).index_add_(0, graph.sender, -pair)
    expected = model(batch)["forces"]
    assert (forces - expected).abs().max() <= 1e-11 * expected.abs().max()


@pytest.mark.parametrize(
    "name,error,message",
    (
        ("toy + positions", InputError, r"block 1 \(OfPositions\) gives no pair forces: it is no function of edge vectors"),
        ("direct + lj", DistributedOpError, r"block 0 \(Direct\) says that the model itself returns forces"),
    ),
)
def test_pair_forces_of_a_part_of_the_blocks(name, error, message):
    model, batch = DistributedModel(composed.pipeline(name)), Batch.from_atoms(parity.structure("triclinic"))
    with pytest.raises(error, match=message):
        model.shares(batch, model.graphs.update(batch), {"pair_forces"})


@pytest.mark.parametrize("made", (bond_models.Bonds, bond_models.ReverseEdges, bond_models.ShortBonds))
def test_bonds_beside_a_wider_block_on_a_graph_made_elsewhere(made):
    """As in `DomainParallel` and LAMMPS."""
    model = DistributedModel(PipelineModelWrapper([made(), lj(7.0)]), DomainConfig(skin=0.5))
    batch = Batch.from_atoms(parity.structure("triclinic"))
    expected = model(batch)["forces"]
    found = model.shares(batch, model.graphs.update(batch), {"forces"})["forces"]
    assert (found - expected).abs().max() <= 1e-11 * expected.abs().max()


def test_blocks_of_one_cutoff_with_other_bonds():
    """Each sees its own bonds, in one pass and on a graph made elsewhere."""
    blocks = [bond_models.ShortBonds(), bond_models.Bonds()]
    batch = Batch.from_atoms(parity.structure("triclinic"))
    expected = sum(DistributedModel(block)(batch)["forces"] for block in blocks)
    model = DistributedModel(PipelineModelWrapper(blocks), DomainConfig(skin=0.5))
    limit = 1e-11 * expected.abs().max()
    assert (model(batch)["forces"] - expected).abs().max() <= limit
    shares = model.shares(batch, model.graphs.update(batch), {"forces"})
    assert (shares["forces"] - expected).abs().max() <= limit
