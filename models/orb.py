"""Orb: its wrapper and its family. Files and architectures are in `nvdd.models.orb_files`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nvdd.config import StrategyKind
from nvdd.errors import InputError
from nvdd.handlers.count import rows_per_system
from nvdd.models.base import BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.models.orb_files import INSTALL, PRETRAINED, build_model, load_file
from nvdd.models.orb_neighbors import nearest
from nvdd.models.orb_parts import check, fixed_inputs, module_of_calculator
from nvdd.models.registry import ModelFamily
from nvdd.specs import SPEC_MPNN_GP, SPEC_MPNN_HALO, ForceStrategy, MLIPSpec, OutputKind, OutputSpec

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
        self.conservative = check(model)
        self.model = model
        self.fixed = fixed_inputs(model, charge=charge, spin=spin)
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

        edge_index, vectors = nearest(data, self.max_num_neighbors, self.dtype)
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


# --- family -------------------------------------------------------------------------------------------------


def _build(checkpoint: str | None, *, dtype: torch.dtype | None = None, **options: Any) -> OrbWrapper:
    model, architecture = load_file(checkpoint, options.pop("architecture", None), options.pop("max_num_neighbors", None))
    wrapper = OrbWrapper(model, **options)
    wrapper.architecture = architecture
    return wrapper.to(dtype).eval().requires_grad_(False)


def _from_calculator(calc: Any) -> OrbWrapper | None:
    model = module_of_calculator(calc)
    return None if model is None else OrbWrapper(model, calc.max_num_neighbors).eval().requires_grad_(False)


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
