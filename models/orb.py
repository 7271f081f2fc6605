"""Orb: its wrapper and its family. Files and architectures are in `nvdd.models.orb_files`."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nvdd.config import StrategyKind
from nvdd.errors import InputError
from nvdd.handlers.count import rows_per_system
from nvdd.models.base import BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.models.orb_files import INSTALL, PRETRAINED, build_model, import_orb, load_file
from nvdd.models.registry import ModelFamily
from nvdd.shard_tensor import ShardTensor, like, to_local
from nvdd.specs import SPEC_MPNN_GP, SPEC_MPNN_HALO, ForceStrategy, MLIPSpec, OutputKind, OutputSpec

_SAME = 1e-9  # A; distances and components nearer than this are equal where neighbours are chosen
_HEADS = ("energy", "forces", "stress", "confidence")
_VOIGT = [[0, 5, 4], [5, 1, 3], [4, 3, 2]]


class OrbWrapper(torch.nn.Module, BaseModelMixin):
    """An Orb model: conservative (https://arxiv.org/abs/2504.06231) or with heads for forces and stress
    (https://arxiv.org/abs/2410.22570).

    The network and its heads run as they are. What Orb calls an edge's sender is the atom whose list of neighbours has the
    edge: it is the centre, which nvdd calls the receiver, so each atom has its whole list, from which the nearest
    ``max_num_neighbors`` are taken, on the rank that owns it. In each layer the features of neighbours are read, and
    messages summed at them: the sums of remote ones go to their owners.

    The energy is a function of the mean of all atoms' features, so there are no energies of atoms.

    Args:
        model: a ``ConservativeForcefieldRegressor`` or ``DirectForcefieldRegressor``, not compiled.
        max_num_neighbors: None for that of the model's ``system_config``.
        charge, spin: of a model for charged molecules: total charge of each system in e, and its spin multiplicity; None:
            ``atoms.info["charge"]`` and ``["spin"]``.

    Attributes:
        model: the module.
        conservative: whether forces are derivatives of the energy.
        architecture: of what it was built, for `nvdd.models.orb_files.build_model`; None if that is unknown.

    Raises:
        InputError: the module is of another class or compiled, or has heads or inputs that are not known here.
        MissingDependencyError: orb-models is missing.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        max_num_neighbors: int | None = None,
        charge: float | None = None,
        spin: float | None = None,
    ) -> None:
        super().__init__()
        self.conservative = _check(model)
        self.model = model
        self.fixed = _fixed(model, charge=charge, spin=spin)
        self.max_num_neighbors = int(max_num_neighbors or model.system_config.max_num_neighbors)
        self.architecture: dict[str, Any] | None = None
        outputs = {"energy", "forces", *model.heads} | ({"stress", "stresses"} if self.conservative else set())
        self.model_config = ModelConfig(
            outputs=frozenset(outputs),
            neighbor_config=NeighborConfig(cutoff=float(model.system_config.radius)),
            system_inputs=frozenset(name for name, value in self.fixed.items() if value is None),
            elements=frozenset(range(1, 118)),
        )

    def forward(self, data: Batch) -> ModelOutputs:
        """``energy`` (n_systems,) eV; ``confidence`` (n_atoms, n_bins) if the model has that head; of a model that is not
        conservative ``forces`` (n_atoms, 3) eV/A and ``stress`` (n_systems, 3, 3) eV/A^3."""
        trains = any(p.requires_grad for p in self.parameters())
        # some of Orb's constants are made in the default type while it runs
        with _default_dtype(self.dtype), torch.set_grad_enabled(self.conservative or trains):
            graphs = self.adapt_input(data)
            features = self.model.model(graphs)["node_features"]
            found = {name: head.predict(features, graphs) for name, head in self.model.heads.items()}
            if self.model.pair_repulsion:
                repulsion = self.model.pair_repulsion_fn(graphs)
                for name in found.keys() & repulsion.keys():
                    found[name] = found[name] + repulsion[name]
        if "stress" in found:
            found["stress"] = found["stress"].reshape(data.n_systems, 6)[:, _VOIGT]
        found["energy"] = found["energy"].reshape(data.n_systems)
        return ModelOutputs(found)

    def adapt_input(self, data: Batch, **kwargs: Any) -> Any:
        """Orb's ``AtomGraphs``, whose senders are centres and receivers their neighbours."""
        from orb_models.forcefield.base import AtomGraphs

        edge_index, vectors = self._nearest(data)
        centres, neighbours = edge_index[0], edge_index[1]
        one_hot = torch.nn.functional.one_hot(data.atomic_numbers, num_classes=118).to(self.dtype)
        systems = {"cell": data.cell} if not self.conservative else {}
        systems |= {f"total_{name}": self._of_systems(data, name) for name in self.fixed}
        numbers = {"atomic_numbers": data.atomic_numbers, "atomic_numbers_embedding": one_hot}
        fields = {
            "senders": centres,
            "receivers": neighbours,
            "n_node": data.n_atoms_per_system,
            "n_edge": rows_per_system(data.batch[centres], data.n_systems),
            "node_features": {"positions": data.positions, **numbers},
            "edge_features": {"vectors": vectors},
            "system_features": systems,
            "radius": self.model_config.neighbor_config.cutoff,
            "max_num_neighbors": torch.tensor([self.max_num_neighbors]),
        }
        return AtomGraphs(**{**dict.fromkeys(AtomGraphs._fields[:-1]), **fields, **kwargs})

    def _of_systems(self, data: Batch, name: str) -> Tensor:
        """(n_systems,) charges or spins."""
        if self.fixed[name] is not None:
            return torch.full((data.n_systems,), self.fixed[name], dtype=self.dtype, device=data.device)
        if name not in data.system_fields:
            raise InputError(
                f"this Orb model is for molecules of given charge and spin: set atoms.info[{name!r}] (a number), or the option "
                f"{name}="
            )
        return data.system_fields[name].reshape(-1).to(self.dtype)

    def _nearest(self, data: Batch) -> tuple[Tensor, Tensor]:
        """The edge index (2, E') and vectors (E', 3) of the nearest neighbours of each atom.

        Where the last of them is one of several at the same distance, the choice is by direction: the same on every rank
        and in any order of atoms.
        """
        edge_index, vectors = data.edge_index, data.edge_vectors.to(self.dtype)
        centres = to_local(data.receivers)
        counts = torch.bincount(centres, minlength=1)
        if not len(centres) or int(counts.max()) <= self.max_num_neighbors:
            return edge_index, vectors
        v = to_local(vectors).detach().double()
        order = torch.arange(len(centres), device=centres.device)
        for key in (*(v / _SAME).round().unbind(1), (v.norm(dim=1) / _SAME).round(), centres):
            order = order[key[order].argsort(stable=True)]
        first = counts.cumsum(0) - counts
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) - first[centres[order]]
        near = place < self.max_num_neighbors
        near = like(near, vectors) if isinstance(vectors, ShardTensor) else near
        return edge_index[:, near], vectors[near]

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """Owned rows; remote ones fetched where neighbours are read, and folded where messages are summed at them."""
        spec = SPEC_MPNN_GP if strategy is StrategyKind.GRAPH_PARTITION else SPEC_MPNN_HALO
        if "confidence" in self.model.heads:
            spec = spec.with_outputs(confidence=OutputSpec(OutputKind.PER_NODE))
        return spec if self.conservative else spec.with_force_strategy(ForceStrategy.DIRECT)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _fixed(model: Any, **given: Any) -> dict[str, float | None]:
    """Charge and spin as given, of a model that reads them; else nothing."""
    if model.model.conditioner is not None:
        try:
            return {name: None if value is None else float(value) for name, value in given.items()}
        except (TypeError, ValueError) as error:
            raise InputError(f"orb: charge and spin must be numbers: {error}") from None
    for name, value in given.items():
        if value is not None:
            raise InputError(f"{name}={value!r} was given, but this Orb model does not read charge and spin")
    return {}


def _check(model: Any) -> bool:
    """Whether the model is conservative; raises InputError for one that can't be used."""
    import_orb()
    from orb_models.forcefield.conservative_regressor import ConservativeForcefieldRegressor
    from orb_models.forcefield.direct_regressor import DirectForcefieldRegressor
    from orb_models.forcefield.nn_util import ChargeSpinConditioner

    if not isinstance(model, (ConservativeForcefieldRegressor, DirectForcefieldRegressor)):
        name = f"{type(model).__module__}.{type(model).__name__}"
        raise InputError(
            f"nvdd's Orb wrapper needs a ConservativeForcefieldRegressor or DirectForcefieldRegressor of orb-models, not a {name}"
        )
    if model.is_compiled():
        raise InputError("this Orb model is compiled, which hides where ranks exchange features; load it with compile=False")
    if model.system_config is None:
        raise InputError("this Orb model does not say its radius and number of neighbours; give it a system_config")
    conservative = isinstance(model, ConservativeForcefieldRegressor)
    wanted = ("energy", "confidence") if conservative else _HEADS
    if unknown := sorted(set(model.heads) - set(wanted)):
        raise InputError(f"this Orb model has heads {unknown}, of which nvdd doesn't know what they mean over ranks")
    if missing := sorted({"energy", *(() if conservative else ("forces",))} - set(model.heads)):
        raise InputError(f"this Orb model has no head for {missing[0]}")
    if not isinstance(model.model.conditioner, (ChargeSpinConditioner, type(None))):
        raise InputError(f"this Orb model is conditioned by a {type(model.model.conditioner).__name__}, which nvdd doesn't know")
    return conservative


# --- family -------------------------------------------------------------------------------------------------


def _build(checkpoint: str | None, *, dtype: torch.dtype | None = None, **options: Any) -> OrbWrapper:
    model, architecture = load_file(checkpoint, options.pop("architecture", None), options.pop("max_num_neighbors", None))
    wrapper = OrbWrapper(model, **options)
    wrapper.architecture = architecture
    return wrapper.to(dtype).eval().requires_grad_(False)


def _from_calculator(calc: Any) -> OrbWrapper | None:
    """A wrapper around a copy of the model of an ``ORBCalculator``; None for another one."""
    theirs = sys.modules.get("orb_models.forcefield.calculator")  # not imported: then calc is not theirs
    if theirs is None or not isinstance(calc, theirs.ORBCalculator):
        return None
    if type(calc).calculate is not theirs.ORBCalculator.calculate:
        return None  # a subclass with physics of its own
    conservative = _check(calc.model)
    if bool(calc.conservative) != conservative:
        raise InputError("this ORBCalculator takes no derivatives of a conservative model; use conservative=True")
    model = copy.deepcopy(calc.model)
    model._system_config = copy.copy(calc.system_config)
    return OrbWrapper(model, calc.max_num_neighbors).eval().requires_grad_(False)


def _configuration(wrapper: OrbWrapper) -> dict[str, Any]:
    if wrapper.architecture is None:
        raise InputError(
            "this Orb model was not read from a file, so its architecture is unknown; export it with allow_pickle "
            "(--allow-pickle), which puts the module itself into the file"
        )
    return {"architecture": wrapper.architecture, "fixed": wrapper.fixed}


def _rebuild(configuration: dict[str, Any], dtype: torch.dtype) -> OrbWrapper:
    wrapper = OrbWrapper(build_model(configuration["architecture"]), **configuration["fixed"]).to(dtype)
    wrapper.architecture = configuration["architecture"]
    return wrapper


FAMILY = ModelFamily(
    name="orb",
    description="Orb v2 and v3, conservative and direct, message passing for all elements (weights are downloaded by orb-models)",
    build=_build,
    checkpoints=tuple(PRETRAINED),
    options={
        "architecture": "of a file: a name of a pretrained model, or {kind: v3_conservative, latent_dim: 256, ...}",
        "max_num_neighbors": "nearest neighbours of each atom; None for the model's own number",
        "charge": "total charge, e, of a model for molecules (omol); None: atoms.info['charge']",
        "spin": "spin multiplicity, of the same; None: atoms.info['spin']",
    },
    package="orb_models",
    install=INSTALL,
    licence="package Apache-2.0; weights Apache-2.0 as their authors state",
    from_calculator=_from_calculator,
    configuration=_configuration,
    rebuild=_rebuild,
)
