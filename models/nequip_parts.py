"""What a model of the nequip framework consists of: which of its modules run, what they read, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvdd.errors import InputError

_EAGER = "Take the package (.nequip.zip) or the checkpoint (.ckpt) from which it was made"
# Modules whose steps are known to be rows by themselves, gathers of senders and sums over receivers
_KNOWN = {
    *("SequentialGraphNetwork", "NodeTypeEmbed", "SphericalHarmonicEdgeAttrs", "EdgeLengthNormalizer"),
    *("BesselEdgeLengthEncoding", "ApplyFactor", "ConvNetLayer", "ScalarMLP", "PerTypeScaleShift"),
    *("AddRadialCutoffToData", "ProductTypeEmbedding", "TwoBodySplineScalarEmbed", "EdgewiseReduce"),
    *("TwoBodySphericalHarmonicTensorEmbed", "Allegro_Module"),
}
# nequip 0.19's LennardJones sums matrices of edges by edges (shapes don't fit), so it is not among them
PAIR_POTENTIALS = {"ZBL"}
_FUSED = {
    *("OpenEquivarianceTensorProductScatter", "CuEquivarianceTensorProductScatter", "TritonContracter"),
    *("CuEquivarianceContracter",),
}
# Modules that read the types of both ends of an edge, from "edge_type_flat" where that is given
_OF_EDGE_TYPES = {"ProductTypeEmbedding", "TwoBodySplineScalarEmbed", *PAIR_POTENTIALS}
_TOTAL = "total_energy_sum"
# What the modules above read, or what nequip declares for every model
_INPUTS = {
    *("pos", "edge_index", "edge_transpose_perm", "edge_cell_shift", "edge_vectors", "cell", "batch", "num_atoms"),
    *("atom_types", "lmp_mliap_data", "num_local_ghost_atoms"),
}


@dataclass(frozen=True)
class Parts:
    """A model, taken apart.

    Attributes:
        modules: those between edge vectors and the energies of atoms, in order.
        dtype: of features and weights.
        cutoff: A.
        type_names: of atom types, in order.
        cutoff_table: the cutoffs of pairs of types, (n_types, n_types) A, the centre's type first; or None.
        reads_edge_types: whether the types of both ends of an edge are read.
        strictly_local: whether no feature of another atom is read.
    """

    modules: tuple[torch.nn.Module, ...]
    dtype: torch.dtype
    cutoff: float
    type_names: tuple[str, ...]
    cutoff_table: tuple[tuple[float, ...], ...] | None
    reads_edge_types: bool
    strictly_local: bool

    def pair_cutoffs(self, device: torch.device) -> Tensor | None:
        """`cutoff_table` as a tensor."""
        table = self.cutoff_table
        return None if table is None else torch.tensor(table, dtype=torch.float64, device=device)

    def types(self, species: dict[str, str] | None) -> tuple[dict[str, str], dict[int, int]]:
        """Symbol -> name of its type, and atomic number -> number of its type.

        Raises:
            InputError: a symbol or a name that does not exist; types that are no symbols, and no map.
        """
        from ase.data import atomic_numbers

        names = list(self.type_names)
        if species is None and (odd := [name for name in names if not atomic_numbers.get(name)]):
            raise InputError(
                f"the atom types {', '.join(odd)} of this nequip model are no chemical symbols; give species, for example "
                f"species={{'Si': {odd[0]!r}}}"
            )
        species = {name: name for name in names} if species is None else dict(species)
        for symbol, name in species.items():
            if not atomic_numbers.get(symbol) or name not in names:
                raise InputError(
                    f"species: {symbol!r}: {name!r} is not a chemical symbol and one of this model's types, {', '.join(names)}"
                )
        return species, {atomic_numbers[symbol]: names.index(name) for symbol, name in species.items()}


def parts_of(model: Any) -> Parts:
    """Takes a ``GraphModel`` apart.

    Raises:
        InputError: it is compiled or scripted, of another framework, fused, or has modules or inputs that nvdd does not
            know to be distributable.
    """
    name = f"{type(model).__module__}.{type(model).__name__}"
    if isinstance(model, torch.jit.ScriptModule) or name.endswith("DictInputOutputWrapper"):
        raise InputError(f"this nequip model is compiled, which hides the steps at which ranks exchange features. {_EAGER}")
    if not getattr(model, "is_graph_model", False):  # also of a class that came with a package
        raise InputError(f"nvdd's nequip wrapper needs a GraphModel of nequip, not a {name}")
    if getattr(model, "is_compile_graph_model", False):
        raise InputError("this nequip model is made for torch.compile in training; build it with compile_mode='eager'")
    if inputs := set(model.model_input_fields) - _INPUTS:
        raise InputError(f"this nequip model reads {', '.join(sorted(inputs))} of each system, which nvdd does not pass")
    energy = getattr(model.model, "func", model.model)
    children = dict(energy.named_children())
    if _TOTAL not in children or type(energy).__name__ != "SequentialGraphNetwork":
        raise InputError(f"this nequip model ({type(energy).__name__}) is no sum of energies of atoms")
    modules = [child for key, child in children.items() if key != _TOTAL]
    _check(modules)
    found = {type(module).__name__ for module in energy.modules()}
    if fused := found & _FUSED:
        raise InputError(
            f"this nequip model uses the fused kernel {', '.join(sorted(fused))}, which reads neighbour rows by itself; take the "
            "model without that modifier"
        )
    metadata, names = model.metadata, tuple(model.type_names)
    flat = metadata.get("per_edge_type_cutoff")
    table = None
    if flat is not None:
        values = [float(value) for value in flat.split()]
        table = tuple(tuple(values[i : i + len(names)]) for i in range(0, len(values), len(names)))
    return Parts(
        modules=tuple(modules),
        dtype=model.model_dtype,
        cutoff=float(metadata["r_max"]),
        type_names=names,
        cutoff_table=table,
        reads_edge_types=table is not None or bool(found & _OF_EDGE_TYPES),
        strictly_local="ConvNetLayer" not in found,
    )


def _check(modules: list[torch.nn.Module]) -> None:
    for module in modules:
        kind = type(module).__name__
        if kind not in _KNOWN | PAIR_POTENTIALS:
            raise InputError(
                f"this nequip model has a {kind}, of which nvdd does not know whether it can be divided over ranks; models of "
                "nequip's NequIPGNNModel and allegro's AllegroModel can, with ZBL as pair potential"
            )
        if kind == "SequentialGraphNetwork":
            _check(list(module.children()))


def pair_energies(module: torch.nn.Module, values: dict[str, Any]) -> Tensor:
    """Energies (n_edges, 1) of a pair potential of nequip: half of each pair's to each direction, eV.

    It reads both ends of an edge by one index, and sums into atoms. Here each end of an edge is an atom of its own, so that
    what it reads is this rank's and each sum has one edge.
    """
    ends = values["edge_type_flat"]
    n_edges = ends.shape[1]
    kept = {name: values[name] for name in ("edge_vectors", "edge_lengths", "normed_edge_lengths") if name in values}
    alone = {"atom_types": ends.reshape(-1), "edge_index": torch.arange(2 * n_edges, device=ends.device).view(2, -1), **kept}
    return module(alone)["atomic_energy"][:n_edges]
