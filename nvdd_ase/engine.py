"""What each rank does for the calculator: holds the model, evaluates it, writes the rows that it owns.

The same class serves one rank in the user's process and N ranks in processes of their own.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from nvdd.communicator import Communicator
from nvdd.config import DomainConfig
from nvdd.data import Batch
from nvdd.errors import InputError
from nvdd.runtime.model import DistributedModel

# output -> the shape of a row, and how to make it from the model's output
ROW_SHAPES: dict[str, tuple[int, ...]] = {
    "energies": (),
    "forces": (3,),
    "stresses": (6,),
    "charges": (),
    "magmoms": (),
}


class Engine:
    """One rank's share of an `NVDDCalculator`.

    Args:
        comm: the ranks.
        arrays: ``positions`` (N, 3) to read; ``energies``, ``forces``, ``stresses`` (N, ...) to write.
        phase: told what the rank is doing.
        model: a name for `nvdd.models.load`, or a wrapper.
        options: of the model.
        dtype: name of a torch dtype, or None.
        domain: arguments of `DomainConfig`.
    """

    def __init__(
        self,
        comm: Communicator,
        arrays: Mapping[str, np.ndarray],
        phase: Callable[[str], None],
        *,
        model: Any,
        options: Mapping[str, Any],
        dtype: str | None,
        domain: Mapping[str, Any],
    ) -> None:
        self.comm, self.arrays = comm, arrays
        torch_dtype = getattr(torch, dtype) if dtype else None
        if isinstance(model, str):
            from nvdd.models import load

            wrapper = load(model, dtype=torch_dtype, **options)
        else:
            wrapper = copy.deepcopy(model)  # the user's own is not moved or cast
            wrapper = wrapper if torch_dtype is None else wrapper.to(torch_dtype)
        wrapper = wrapper.to(comm.device).eval()
        self.model = DistributedModel(wrapper, DomainConfig(mesh=comm, **domain), report_phase=phase)
        self._fixed: dict[str, Any] = {}
        self._last: dict[str, int] = {}
        self._n_evaluations = 0

    def describe(self, _: Any = None) -> dict[str, Any]:
        """What the calculator must know of the model."""
        config = self.model.wrapper.model_config
        return {
            "name": type(self.model.wrapper).__name__,
            "cutoff": config.neighbor_config.cutoff,
            "elements": config.elements,
            "node_inputs": sorted(config.node_inputs),
            "system_inputs": sorted(config.system_inputs),
            "outputs": sorted(self.model.available_outputs),
            "dtype": str(self.model.wrapper.dtype).removeprefix("torch."),
        }

    def evaluate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Evaluates the atoms; per-atom results go to the shared arrays, in the user's order.

        Args:
            payload: ``wanted`` outputs, ``cell``; ``numbers``, ``pbc`` and ``fields`` when they have changed.

        Returns:
            energy (float) and stress (3, 3) or None.
        """
        self._fixed.update({k: payload[k] for k in ("numbers", "pbc", "node_fields", "system_fields") if k in payload})
        batch = Batch(
            positions=torch.from_numpy(self.arrays["positions"]),
            atomic_numbers=torch.from_numpy(self._fixed["numbers"]),
            cell=torch.from_numpy(payload["cell"])[None],
            pbc=torch.from_numpy(self._fixed["pbc"])[None],
            n_systems=1,
            node_fields={k: torch.from_numpy(v) for k, v in self._fixed["node_fields"].items()},
            system_fields={k: torch.from_numpy(v)[None] for k, v in self._fixed["system_fields"].items()},
        )
        out = self._forward(batch, payload["wanted"])
        ids = self.ids = out.ids.cpu().numpy()
        for name in ROW_SHAPES:
            if name in out:
                value = out[name].cpu().numpy()
                self.arrays[name][ids] = voigt(value) if name == "stresses" else value
        graph = self.model.graphs
        self._n_evaluations += 1
        self._last = {"owned": len(ids), "halo": out.n_halo, "edges": out.n_edges, "rebuilds": graph.n_builds}
        return {
            "energy": float(out["energy"][0]),
            "stress": out["stress"][0].cpu().numpy() if "stress" in out else None,
        }

    def _forward(self, batch: Batch, wanted: set[str]) -> Any:
        try:
            return self.model(batch, wanted)
        except AttributeError as error:
            config = self.model.wrapper.model_config
            for place, names, given in (
                ("info", config.system_inputs, batch.system_fields),
                ("arrays", config.node_inputs, batch.node_fields),
            ):
                if error.name in set(names) - set(given):
                    raise InputError(
                        f"the model reads atoms.{place}[{error.name!r}], which these atoms don't have"
                    ) from error
            raise

    def report(self, _: Any = None) -> dict[str, Any]:
        """This rank's process; load and time of its last evaluation, seconds by phase."""
        process = {"pid": os.getpid(), "device": str(self.comm.device), "evaluations": self._n_evaluations}
        return {**self._last, **process, "seconds": dict(self.model.timings)}


def voigt(tensors: np.ndarray) -> np.ndarray:
    """(..., 3, 3) -> (..., 6) in ASE's order xx, yy, zz, yz, xz, xy."""
    return tensors[..., [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
