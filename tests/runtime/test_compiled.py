"""Compiled forwards: the eager numbers, on steps other than the one that was traced."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

import md
import parity
import toys
from bond_models import Bonds
from nvdd import (
    NVE,
    Batch,
    CompilePolicy,
    DistributedModel,
    DistributedOpError,
    DistributionSpec,
    DomainConfig,
    DomainParallel,
    ForceStrategy,
    HaloStoragePolicy,
    InputError,
    MLIPSpec,
    ModelOutputs,
    OutputKind,
    OutputSpec,
    Reduce,
    ShardedStoragePolicy,
    dispatch_trace,
    to_local,
)

# torch's own warning, of a model that calls it
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")


def steps(atoms: Any, n: int, size: float = 0.1) -> list[Batch]:
    """The structure, and others near it."""
    rng = np.random.default_rng(7)
    found = [Batch.from_atoms(atoms)]
    for _ in range(n - 1):
        atoms = atoms.copy()
        atoms.positions += rng.normal(scale=size / 3, size=atoms.positions.shape)
        found.append(Batch.from_atoms(atoms))
    return found


def toys_on_rank(comm, names: tuple[str, ...], structure_name: str, compile: Any, **domain: Any) -> dict[str, Any]:
    """Of each toy the difference from its eager run, relative, on steps that were not traced; or why it is refused."""
    out: dict[str, Any] = {}
    for name in names:
        model = toys.toy(name)
        spec = model.distribution_spec()
        wanted = {"energy", "forces"} | (set(spec.outputs) - {"energies"})
        if spec.force_strategy in (ForceStrategy.EDGE_VECTORS, ForceStrategy.POSITIONS):
            wanted |= {"virial"}
        batches = steps(toys.structure(structure_name), 3)
        eager = DistributedModel(model, DomainConfig(mesh=comm, skin=0.6, **domain))
        try:
            fast = DistributedModel(model, DomainConfig(mesh=comm, skin=0.6, compile=compile, **domain))
            worst = 0.0
            for batch in batches:
                ours, theirs = fast(batch, wanted), eager(batch, wanted)
                for key, value in theirs.items():
                    scale = max(1e-3, float(value.abs().max())) if value.numel() else 1.0
                    assert ours[key].shape == value.shape, (name, key)
                    worst = max(worst, float((ours[key] - value).abs().max()) / scale if value.numel() else 0.0)
            out[name] = worst, fast._compiled[0].n_traces
        except (InputError, DistributedOpError) as error:
            out[name] = str(error), 0
    return out


# the first number of atoms of a rank is what a compiled forward has not
REFUSED = {"energy share": "number of atoms of this rank", "masked": "aten.index.Tensor"}
NAMES = tuple(toys.TOYS)


def check_toys(ranks, world_size: int, structure_name: str, names: tuple[str, ...], **domain: Any) -> None:
    parts = ranks.run(world_size, toys_on_rank, names, structure_name, "eager", **domain)
    for name in names:
        for worst, traces in (part[name] for part in parts):
            if name in REFUSED:
                assert REFUSED[name] in worst, (name, worst)
            else:
                assert worst <= 1e-11, (name, worst)
                assert traces == 1, (name, traces)


@pytest.mark.parametrize("world_size,structure_name,start", ((1, "slab", 0), (2, "triclinic", 3), (3, "pair", 5)))
def test_toys(ranks, world_size, structure_name, start):
    """Models of all patterns; open axes, ranks that own nothing; two of three steps were not traced."""
    check_toys(ranks, world_size, structure_name, NAMES[start::12])


def test_a_toy_under_graph_partition(ranks):
    parts = ranks.run(2, graph_partition_on_rank)
    assert max(worst for worst, _ in parts) <= 1e-11


def graph_partition_on_rank(comm) -> tuple[float, int]:
    return toys_on_rank(comm, ("charge equilibration",), "triclinic", "eager", strategy="graph")["charge equilibration"]


@pytest.mark.slow  # CI takes a twelfth of them, and not on four ranks
@pytest.mark.parametrize("structure_name", [name for name in toys.STRUCTURES if name != "several"])
@pytest.mark.parametrize("world_size", (1, 2, 4))
@pytest.mark.parametrize("part", range(4))
def test_all_toys_on_all_structures(ranks, world_size, structure_name, part):
    check_toys(ranks, world_size, structure_name, NAMES[part::4])


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_values_is_refused_by_name(name):
    from nvdd.communicator import Communicator

    refusal, _ = toys_on_rank(Communicator(None), (name,), "triclinic", "eager")[name]
    assert REFUSED[name] in refusal and "leave compile out" in refusal


def models_on_rank(comm, names: tuple[str, ...], halo_correction: bool) -> dict[str, Any]:
    """Of real models the numbers of the last of three steps, and its messages."""
    out = {}
    for name in names:
        wrapper, spec = parity.wrapper(name), None
        if halo_correction:
            policy = HaloStoragePolicy(scatter_mode="halo_correction", gather_mode="halo_read")
            spec = MLIPSpec(DistributionSpec(policy), wrapper.distribution_spec().outputs)
        model = DistributedModel(wrapper, DomainConfig(mesh=comm, compile="eager"), spec=spec)
        for batch in steps(parity.structure(STRUCTURE[name]), 3, 0.05):
            with dispatch_trace() as trace:
                found = model(batch, ("energy", "energies", "forces", "stress", "stresses"))
        out[name] = {
            "ids": found.ids.numpy(),
            **{key: value.numpy() for key, value in found.items()},
            "exchanges": trace.n_exchanges,
            "traces": model._compiled[0].n_traces,
        }
    return out


STRUCTURE = {"lj": "argon", "mace": "quartz", "7net-0/float64": "quartz"}
MESSAGES = {"lj": 1, "mace": 4, "7net-0/float64": 10}


@pytest.mark.parametrize("world_size,halo_correction", ((1, False), (2, False), (3, False), (2, True)))
def test_models_equal_their_own_calculators(ranks, world_size, halo_correction):
    names = ("lj", "mace") if world_size == 3 or halo_correction else ("lj", "mace", "7net-0/float64")
    parts = ranks.run(world_size, models_on_rank, names, halo_correction)
    for name in names:
        atoms = parity.structure(STRUCTURE[name]).copy()
        atoms.positions = steps(atoms, 3, 0.05)[-1].positions.numpy()
        mine = [part[name] for part in parts]
        parity.assert_parity(parity.assemble(mine, len(atoms)), parity.exact(name, atoms), tight=True)
        assert {part["traces"] for part in mine} == {1}
        if not halo_correction:
            assert {part["exchanges"] for part in mine} == {MESSAGES[name] if world_size > 1 else 0}


@pytest.mark.parametrize("name,world_size", (("silica pair", 3), ("quartz slab", 2), ("silica tiny", 2)))
def test_the_envelope(ranks, name, world_size):
    parts = ranks.run(world_size, parity.on_rank, "mace", name, {"compile": "eager"})
    parity.assert_parity(parity.assemble(parts, len(parity.structure(name))), parity.reference("mace", name), tight=True)


def grown_on_rank(comm) -> list[tuple[int, float]]:
    """Graphs made and the difference from the eager forces, for atoms that come closer and closer together."""
    model = toys.toy("messages, index_add")
    fast = DistributedModel(model, DomainConfig(mesh=comm, compile="eager"))
    eager = DistributedModel(model, DomainConfig(mesh=comm))
    out = []
    atoms = toys.structure("triclinic")
    for scale in (1.0, 0.97, 0.9, 1.0, 0.9):
        moved = atoms.copy()
        moved.set_cell(atoms.cell * scale, scale_atoms=True)
        batch = Batch.from_atoms(moved)
        off = (fast(batch)["forces"] - eager(batch)["forces"]).abs().max()
        out.append((fast._compiled[0].n_traces, float(off)))
    return out


def test_capacities_grow_and_never_shrink(ranks):
    for part in ranks.run(2, grown_on_rank):
        assert max(off for _, off in part) <= 1e-12
        traces = [n for n, _ in part]
        assert traces[0] == 1 and traces[2] > 1
        assert traces[3] == traces[4] == traces[2], "what fitted once fits again"


def hot_gas_on_rank(comm) -> dict[str, Any]:
    """A thousand steps of hot argon under DomainParallel, compiled, and 250 eager ones; when graphs were made."""
    out: dict[str, Any] = {"made": []}
    for compile, blocks in ((False, 1), ("eager", 4)):
        config = DomainConfig(mesh=comm, skin=0.6, compile=compile)
        run = DomainParallel(NVE(timestep=4.0), parity.wrapper("lj"), config)
        run.partition(Batch.from_atoms(md.hot_argon()) if comm.rank == 0 else None)
        for block in range(blocks):
            run.run(250)
            if block == 0 and (final := run.gather()) is not None:
                out[str(compile)] = final.positions.numpy()
            if compile:
                out["made"].append(run.model._compiled[0].n_traces)
        out["migrated"] = run.migration.n_migrated
    return out


def test_no_graph_is_made_after_the_first_steps_of_a_run_with_migration(ranks):
    parts = ranks.run(2, hot_gas_on_rank)
    for part in parts:
        assert part["made"][0] == part["made"][-1], part["made"]
        assert part["migrated"] > 20
    # chaotic motion makes much of rounding
    np.testing.assert_allclose(parts[0]["eager"], parts[0]["False"], rtol=0, atol=1e-7)


def test_inductor():
    """The compiled numbers, with no break in the graph and none made again."""
    toy = toys.toy("messages, index_add")
    fast, eager = (DistributedModel(toy, DomainConfig(compile=compile)) for compile in ("inductor", False))
    torch._dynamo.utils.counters.clear()
    wanted = {"energy", "forces", "virial"}
    for batch in steps(toys.structure("slab"), 4):
        ours, theirs = fast(batch, wanted), eager(batch, wanted)
        for name in wanted:
            assert (ours[name] - theirs[name]).abs().max() <= 1e-11 * theirs[name].abs().max() + 1e-14
    assert fast._compiled[0].n_traces == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_an_unknown_element_is_an_error_after_the_step(ranks):
    model = DistributedModel(parity.wrapper("mace"), DomainConfig(compile="eager"))
    batch = Batch.from_atoms(parity.structure("quartz"))
    model(batch)
    batch.atomic_numbers = batch.atomic_numbers.clone()
    batch.atomic_numbers[3] = 79
    with pytest.raises(InputError, match=r"one_hot .* element"):
        model(batch)


class TestRefusals:
    @pytest.mark.parametrize("compile", ("jit", 1.5, "cuda"))
    def test_unknown_backend(self, compile):
        with pytest.raises(InputError, match="compile must be True, False or one of 'eager', 'inductor'"):
            DomainConfig(compile=compile)

    def test_cuda_graphs_without_a_gpu(self):
        with pytest.raises(InputError, match="needs a GPU"):
            DistributedModel(toys.toy("fields"), DomainConfig(compile="cudagraphs"))

    def test_several_systems(self):
        model = DistributedModel(toys.toy("fields"), DomainConfig(compile="eager"))
        with pytest.raises(InputError, match="one system at a time"):
            model(toys.batch_of("several"))

    def test_second_derivatives(self):
        model = DistributedModel(toys.toy("messages, index_add"), DomainConfig(compile="eager"))
        with pytest.raises(InputError, match="differentiated once"):
            model(toys.batch_of("slab"), create_graph=True)

    @pytest.mark.parametrize(
        "policy,words",
        (
            (CompilePolicy(static_shapes=False), "static_shapes=False"),
            (CompilePolicy(graph_padder="nvdd:DensePadder"), "no subclass of nvdd.COOPadder"),
            (CompilePolicy(graph_padder="nvdd:NoSuchThing"), "NoSuchThing"),
        ),
    )
    def test_policies(self, policy, words):
        model = toys.toy("messages, index_add")
        spec = model.distribution_spec().with_compile_policy(policy)
        with pytest.raises(InputError, match=words):
            DistributedModel(model, DomainConfig(compile="eager"), spec=spec)
        DistributedModel(model, DomainConfig(), spec=spec)  # of no matter to an eager run

    def test_sharded_storage(self):
        spec = MLIPSpec(DistributionSpec(ShardedStoragePolicy()), toys.toy("fields").distribution_spec().outputs)
        with pytest.raises(InputError, match="global ids"):
            DistributedModel(toys.toy("fields"), DomainConfig(compile="eager"), spec=spec)

    def test_bonds(self):
        with pytest.raises(InputError, match="bonds or reverse edges"):
            DistributedModel(Bonds(), DomainConfig(compile="eager"))


def test_a_policy_chooses_padder_and_force_strategy():
    model = toys.toy("positions")
    policy = CompilePolicy(graph_padder="toys:WidePadder", force_strategy=ForceStrategy.POSITIONS)
    spec = model.distribution_spec().with_compile_policy(policy)
    fast = DistributedModel(model, DomainConfig(compile="eager"), spec=spec)
    block = fast._compiled[0]
    assert isinstance(block.padder, toys.WidePadder) and block.block.spec.force_strategy is ForceStrategy.POSITIONS
    batch = toys.batch_of("slab")
    found, expected = fast(batch), DistributedModel(model, DomainConfig())(batch)
    assert block.padder.cap % 512 == 0
    assert (found["forces"] - expected["forces"]).abs().max() <= 1e-12


class OutsideTorch(toys.toy("fields").__class__):
    """A step of its forward is done by NumPy, or by a kernel that writes where torch can't see it."""

    how = "numpy"

    def forward(self, data):
        out = super().forward(data)
        plain = to_local(data.edge_vectors).detach()
        if self.how == "numpy":
            scale = float(np.tanh(np.abs(plain.numpy()).mean()))
        else:
            hidden = torch.empty(1, dtype=plain.dtype)
            ctypes.memmove(hidden.data_ptr(), (plain.square().sum() + 1.0).reshape(1).data_ptr(), 8)
            scale = hidden
        return ModelOutputs(energies=out["energies"] * scale)


@pytest.mark.parametrize("how,words", (("numpy", r"Tensor\.numpy at .*test_compiled"), ("kernel", "no operation of torch")))
def test_what_the_graph_can_not_have_seen(how, words):
    model = OutsideTorch()
    model.how = how
    batch = toys.batch_of("slab")
    DistributedModel(model, DomainConfig())(batch)
    with pytest.raises(DistributedOpError, match=words):
        DistributedModel(model, DomainConfig(compile="eager"))(batch)


# -- what rows that fill up, or values that are read, could have made wrong


class Statistic(toys.Toy):
    """An energy that one number of all atoms scales."""

    by = "lowest norm"

    def energies(self, data):
        h = self.features(data)
        if self.by == "lowest norm":
            return self.readout(h).squeeze(-1) * (h.abs() + 0.1).norm(-1, dim=0).sum()
        if self.by == "extremum of means":
            return h[:, 0] * h[:, 1].mean() * h[:, 2].max()
        if self.by == "degrees":
            degree = torch.zeros_like(h).index_add(0, data.receivers, self.waves(data.edge_vectors).exp())
            return (h * (degree.mean() / degree).sqrt()).sum(1)
        return self.readout(h).squeeze(-1) * len(h)


class Shares(toys.Toy):
    """This rank's share of the energy, summed over plain rows."""

    outputs = {"energy": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE)}  # noqa: RUF012

    def forward(self, data):
        return ModelOutputs(energy=to_local(self.energies(data)).sum().reshape(1))


class Listed(toys.Toy):
    """Makes a tensor of a number of another one."""

    def energies(self, data):
        scale = torch.tensor([to_local(data.edge_vectors).detach().norm(dim=1).mean()])
        return self.readout(self.features(data)).squeeze(-1) * scale


def statistics_on_rank(comm, names: tuple[str, ...]) -> dict[str, float]:
    out = {}
    for name in names:
        model = Statistic()
        model.by = name
        fast, eager = (DistributedModel(model, DomainConfig(mesh=comm, compile=c)) for c in ("eager", False))
        worst = 0.0
        for batch in steps(toys.structure("triclinic"), 3):
            ours, theirs = fast(batch), eager(batch)
            for key in ("energy", "forces"):
                worst = max(worst, float(((ours[key] - theirs[key]).abs() / theirs[key].abs().max()).max()))
        out[name] = worst
    return out


@pytest.mark.parametrize("world_size", (1, 2))
def test_statistics_of_all_atoms(ranks, world_size):
    for part in ranks.run(world_size, statistics_on_rank, ("lowest norm", "extremum of means", "degrees")):
        assert all(worst <= 1e-10 for worst in part.values()), part


def number_of_rows() -> Statistic:
    model = Statistic()
    model.by = "number of rows"
    return model


@pytest.mark.parametrize("model", (Shares, number_of_rows))
def test_rows_that_fill_up_are_found_where_a_model_counts_them(model):
    model, batch = model(), toys.batch_of("slab")
    DistributedModel(model, DomainConfig())(batch)
    with pytest.raises(DistributedOpError, match="filled up to a capacity"):
        DistributedModel(model, DomainConfig(compile="eager"))(batch)


def test_a_tensor_of_a_list_of_tensors():
    with pytest.raises(DistributedOpError, match="tensor of a list of tensors"):
        DistributedModel(Listed(), DomainConfig(compile="eager"))(toys.batch_of("slab"))


def test_a_model_that_changes_is_traced_anew():
    model, batch = Statistic(), toys.batch_of("slab")
    fast, eager = (DistributedModel(model, DomainConfig(compile=c)) for c in ("eager", False))
    fast(batch)
    model.readout[2].weight = torch.nn.Parameter(2 * model.readout[2].weight.detach())
    assert (fast(batch)["forces"] - eager(batch)["forces"]).abs().max() <= 1e-12
    with torch.no_grad():
        model.readout[2].weight.mul_(3.0)  # in place: of no matter to the graph
    assert (fast(batch)["forces"] - eager(batch)["forces"]).abs().max() <= 1e-12
    assert fast._compiled[0].n_traces == 2


def test_another_type_of_an_input_is_traced_anew():
    model, batch = toys.toy("fields"), toys.batch_of("slab")
    fast, eager = (DistributedModel(model, DomainConfig(compile=c)) for c in ("eager", False))
    for value in (torch.tensor([1]), torch.tensor([1.5], dtype=torch.float64), torch.tensor([2])):
        batch.system_fields["charge"] = value
        assert (fast(batch)["energy"] - eager(batch)["energy"]).abs().max() <= 1e-12
    assert fast._compiled[0].n_traces == 3


class OwnGradient(toys.Toy):
    """Returns forces of its own making, of energies of pairs."""

    strategy = ForceStrategy.MODEL_INTERNAL
    outputs = {"energies": toys.PER_NODE, "forces": toys.PER_NODE}  # noqa: RUF012

    def forward(self, data):
        h = self.features(data)
        pairs = self.waves(data.edge_vectors).sum(1) * (1 + h[:, 0].square().mean(0))
        (slope,) = torch.autograd.grad([pairs], [data.edge_vectors], grad_outputs=[torch.ones_like(pairs)], retain_graph=True)
        forces = torch.zeros(data.n_atoms, 3, dtype=slope.dtype).index_add(0, data.receivers, slope)
        return ModelOutputs(energies=self.readout(h).squeeze(-1), forces=forces)


def test_seeds_of_edges_that_fill_up_count_nowhere():
    fast, eager = (DistributedModel(OwnGradient(), DomainConfig(compile=c)) for c in ("eager", False))
    for batch in steps(toys.structure("slab"), 2):
        assert (fast(batch)["forces"] - eager(batch)["forces"]).abs().max() <= 1e-11
