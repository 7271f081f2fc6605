"""One process: geometries and their truths, and what is wrong there already, so that no spec can help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nvdd.data import Batch
from nvdd.specs import OutputKind
from nvdd.validate import reference
from nvdd.validate.checks import DERIVED
from nvdd.validate.diagnosis import Diagnosis, translate
from nvdd.validate.factory import FactoryRef, checksum
from nvdd.validate.geometries import Case, dynamics, make_cases
from nvdd.validate.helpers import HelperWatch, packages_of, watch_helpers
from nvdd.validate.reference import Truth
from nvdd.validate.tolerance import Tolerance, compare


class SingleProcess:
    """The model in this process.

    Args:
        factory: makes the wrapper.
        sample: the structure.
        n_ranks: over how many ranks it will be divided.
        device: where this process computes.
        watch: packages whose helpers are watched; None for those of the model.
        seed: of the displacements.

    Attributes:
        wrapper, weights: the model, and a checksum of it as it was made.
        geometries, truths: by name; a geometry that the model can't do in one process has no truth.
        cases: what to evaluate over ranks.
        kinds: kind of each output that the wrapper returns.
        ops: torch operations of the first forward.
        notes: what is left out, and why.
    """

    def __init__(
        self,
        factory: FactoryRef,
        sample: Batch,
        n_ranks: int,
        device: torch.device,
        watch: Sequence[str] | None,
        seed: int,
    ) -> None:
        self.factory, self.sample, self.n_ranks, self.device, self.seed = factory, sample, n_ranks, device, seed
        self.wrapper: Any = factory.make(device)
        self.weights = checksum(self.wrapper)  # now: BatchNorm in training changes its buffers
        self.watch = tuple(packages_of(self.wrapper) if watch is None else watch)
        self.geometries: dict[str, Batch] = {}
        self.truths: dict[str, Truth] = {}
        self.cases: list[Case] = []
        self.kinds: dict[str, OutputKind] = {}
        self.ops: Counter = Counter()
        self.notes: list[str] = []
        self._watched: HelperWatch | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the model."""
        return getattr(self.wrapper, "dtype", torch.float64)

    @property
    def cutoff(self) -> float:
        """Of the model, A."""
        return self.wrapper.model_config.neighbor_config.cutoff

    @property
    def returned(self) -> frozenset[str]:
        """Names that the wrapper returns."""
        return self.truths["as given"].returned

    def truth(self, name: str, layers: bool = False) -> Truth:
        """Evaluates a geometry."""
        return reference.evaluate(
            self.wrapper, self.geometries[name], self.device, layers, self._watched, ops=None if self.ops else self.ops
        )

    def prepare(self, md_steps: int) -> None:
        """Makes the geometries and their truths."""
        with watch_helpers(self.watch) as self._watched:
            self._evaluate_truths(md_steps)
        self._watched = None
        self._infer_kinds()

    def _evaluate_truths(self, md_steps: int) -> None:
        self.geometries, cases = make_cases(self.sample, self.n_ranks, self.seed)
        for case in cases:
            why = None
            for name in dict.fromkeys(case.geometries):
                if name not in self.truths and why is None:
                    why = self._add_truth(name, case.essential)
            if why is None:
                self.cases.append(case)
            else:
                # the other geometries of the case still count
                kept = tuple(g for g in case.geometries if g in self.truths)
                self.notes.append(f"{case.name}: {why}")
                if kept and case.name != "two systems":
                    self.cases.append(replace(case, geometries=kept))
        if md_steps > 0:
            self._add_dynamics(md_steps)

    def _add_truth(self, name: str, essential: bool) -> str | None:
        """Evaluates the single process; where it may fail and does, gives the reason."""
        try:
            truth = self.truth(name)
        except Exception as error:
            if essential:
                raise
            return f"{name} fails in one process ({type(error).__name__}: {error})"
        if not essential and not all(np.isfinite(v).all() for v in truth.values.values()):
            return f"{name} is not finite in one process"
        if name == "two systems" and (why := self._takes_one_system(truth)):
            return why
        self.truths[name] = truth
        return None

    def _takes_one_system(self, truth: Truth) -> str | None:
        """Whether the model gives no energy for each system of a batch; a model that mixes them gets a note."""
        n = self.sample.n_systems
        energy, alone = truth.values.get("energy"), self.truths["rattled"].values.get("energy")
        if energy is None or alone is None or energy.shape != (2 * n,):
            return "the model gives no energy for two systems"
        if np.abs(energy[:n] - alone).max() > 1e-5 * max(float(np.abs(alone).max()), 1e-300):
            self.notes.append(
                "in one process the energy of a system depends on the others in the batch, and over ranks too"
            )
        return None

    def _add_dynamics(self, steps: int) -> None:
        forces = lambda batch: reference.evaluate(self.wrapper, batch, self.device).values.get(
            "forces", np.zeros(batch.positions.shape)
        )
        frames = dynamics(self.sample, forces, steps, self.seed)
        for name, frame in frames.items():
            self.geometries[name] = frame
            self.truths[name] = self.truth(name)
        self.cases.append(Case("dynamics", tuple(frames)))

    def _infer_kinds(self) -> None:
        one, many = self.truths["as given"], self.truths.get("two systems")
        doubled = self.geometries.get("two systems")
        sizes = (doubled.n_atoms, doubled.n_systems) if doubled is not None else (0, 0)
        self.kinds = reference.infer_kinds(one, self.sample.n_atoms, self.sample.n_systems, many, *sizes)

    def judge(self, tolerance: Tolerance) -> list[Diagnosis]:
        """What is wrong in one process already, so that no spec can help."""
        found = []
        truth = self.truths["as given"]
        if "energy" not in truth.values:
            found.append(
                Diagnosis(
                    "no-energy",
                    f"the wrapper returned {sorted(truth.returned)}: no energy that can be summed",
                    "Return energies (n_atoms,), or energy (n_systems,)",
                )
            )
        for name, t in self.truths.items():
            bad = sorted(k for k, v in t.values.items() if not np.isfinite(v).all())
            if bad:
                text = f"{', '.join(bad)} [{name}] is not finite in one process"
                found.append(Diagnosis("reference-not-finite", text, "Repair the model, or take another sample"))
                break
        wants_forces = "forces" in self.wrapper.model_config.outputs
        if truth.severed and wants_forces and "forces" not in truth.returned and not found:
            found.append(translate(RuntimeError("the energy does not depend on the geometry")))
        return found or self._judge_tested(tolerance) or self._judge_repeatable(truth, tolerance)

    def _judge_repeatable(self, truth: Truth, tolerance: Tolerance) -> list[Diagnosis]:
        """Random numbers, state between calls, other weights, and dependence on the order of atoms."""
        again = self.truth("as given")
        if name := self._differs(truth, again, None, tolerance):
            return [
                Diagnosis(
                    "not-repeatable",
                    f"{name} of the same structure differs between two calls in one process: the model draws random numbers "
                    "or keeps something from call to call",
                    "Call model.eval() in the factory, and let every output depend on the inputs alone",
                )
            ]
        if checksum(self.factory.make(self.device)) != self.weights:
            return [
                Diagnosis(
                    "weights-differ",
                    "the factory makes other weights each time, so each rank would compute another model",
                    "Load a checkpoint, or seed it: torch.manual_seed(0) in the factory",
                )
            ]
        moved, order = reference.permuted(self.sample, self.seed)
        other = reference.evaluate(self.wrapper, moved, self.device)
        if name := self._differs(truth, other, order, tolerance):
            return [
                Diagnosis(
                    "order-dependent",
                    f"{name} depends on the order of the atoms: with the atoms permuted, one process gives other values",
                    "Find what picks atoms by their row (x[0], a sort, a running sum); it has no meaning over ranks",
                )
            ]
        return []

    def _differs(self, truth: Truth, other: Truth, order: np.ndarray | None, tolerance: Tolerance) -> str | None:
        """The first output that differs by more than the limits; ``order``: row of ``truth`` of each row of ``other``."""
        system = self.sample.batch.numpy()
        for name, value in sorted(truth.values.items()):
            kind = self.kinds.get(name)
            per_atom = kind is OutputKind.PER_NODE if kind is not None else DERIVED.get(name, False)
            found = other.values.get(name, np.zeros(0))
            if order is not None and per_atom and found.shape[:1] == order.shape:
                rows = np.empty_like(found)
                rows[order] = found
                found = rows
            counts = np.bincount(system, minlength=self.sample.n_systems)
            is_atoms = per_atom and value.shape[:1] == system.shape
            largest = max(
                float(np.abs(t.values[name]).max(initial=0.0)) for t in self.truths.values() if name in t.values
            )
            result = compare(name, "", found, value, tolerance, system if is_atoms else None,
                             None if is_atoms else counts, largest)  # fmt: skip
            if not result.ok:
                return name
        return None

    def _judge_tested(self, tolerance: Tolerance) -> list[Diagnosis]:
        """Zeros compare equal whatever goes wrong."""
        largest = lambda name: max(
            (np.abs(t.values[name]).max(initial=0) for t in self.truths.values() if name in t.values), default=0.0
        )
        wanted = {"energy"} | ({"forces"} if "forces" in self.truths["as given"].values else set())
        empty = sorted(name for name in wanted if not largest(name) > tolerance.atol)
        for name in sorted(self.truths["as given"].values.keys() - wanted):
            if largest(name) <= tolerance.atol:
                self.notes.append(f"{name} is below atol in every geometry: only its absolute error is compared")
        if not empty:
            return []
        text = f"{', '.join(empty)} is zero (below atol) in every geometry of the sample, so nothing would be tested"
        return [
            Diagnosis("nothing-tested", text, "Give a structure with neighbours within the cutoff, or a smaller atol")
        ]
