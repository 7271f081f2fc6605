"""The engine where ranks share no memory: positions go out from rank 0, results come back by rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nvdd.communicator import Communicator
from nvdd.errors import InputError
from nvdd.runtime.agreement import digest
from nvdd_ase.engine import ROW_SHAPES, Engine


class SpmdEngine(Engine):
    """One rank's share of an `NVDDCalculator` under a launcher.

    Args:
        comm, arrays, phase: as for `Engine`; ``arrays`` is this rank's own.
        everywhere: every rank has the positions and gets all rows; else rank 0 alone.
        kwargs: of `Engine`.
    """

    def __init__(
        self,
        comm: Communicator,
        arrays: dict[str, np.ndarray],
        phase: Callable[[str], None],
        *,
        everywhere: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(comm, arrays, phase, **kwargs)
        self.everywhere, self._phase = everywhere, phase
        self._check_weights()

    def _check_weights(self) -> None:
        """Ranks read the model each by itself: from other files, or from random numbers, they would have other ones."""
        weights = {k: v for k, v in self.model.wrapper.state_dict().items() if isinstance(v, torch.Tensor)}
        digests = self.comm.all_gather_object(digest(weights), site="weights")
        others = [rank for rank, value in enumerate(digests) if value != digests[0]]
        if others:
            raise InputError(
                f"the model's weights on ranks {others} are not those of rank 0: give all ranks the same file, on every "
                "host, and seed what is random"
            )

    def fingerprint(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The inputs of `evaluate` by name, for comparison over the ranks."""
        names = ("numbers", "cell", "pbc", "node_fields", "system_fields")
        values = {"positions": self.arrays["positions"], **{name: payload.get(name) for name in names}}
        return {**values, "the properties asked for": payload["wanted"]}

    def evaluate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """As `Engine.evaluate`; ``payload["n_atoms"]`` is the number of atoms."""
        n = payload["n_atoms"]
        names = [name for name in ROW_SHAPES if name in payload["wanted"]]
        for name, shape in (("positions", (3,)), *((name, ROW_SHAPES[name]) for name in names)):
            if self.arrays.get(name) is None or self.arrays[name].shape != (n, *shape):
                self.arrays[name] = np.zeros((n, *shape))
        if not self.everywhere:
            self._phase("positions")
            positions = self.arrays["positions"]
            positions[:] = self.comm.broadcast(torch.from_numpy(positions), site="positions").numpy()
        answer = super().evaluate(payload)
        self._phase("collect")
        self._collect(names)
        return answer

    def report(self, payload: Any = None) -> Any:
        """As `Engine.report`; where every rank runs the script, those of all ranks in a list."""
        mine = super().report(payload)
        return self.comm.all_gather_object(mine, site="report") if self.everywhere else mine

    def _collect(self, names: list[str]) -> None:
        """Sends owned rows to rank 0, or to all; one message from each rank to each of them."""
        comm = self.comm
        mine = [self.ids[:, None].astype(np.float64)]  # exact below 2^53
        widths = [int(np.prod(ROW_SHAPES[name], dtype=int)) for name in names]
        mine += [self.arrays[k][self.ids].reshape(len(self.ids), w) for k, w in zip(names, widths, strict=True)]
        rows = torch.from_numpy(np.concatenate(mine, 1))
        if comm.backend == "nccl":
            rows = rows.to(comm.device)
        to = [rank for rank in (range(comm.size) if self.everywhere else [0]) if rank != comm.rank]
        send_counts = [len(rows) if rank in to else 0 for rank in range(comm.size)]
        recv_counts = comm.transpose_counts(send_counts, site="rows of results")
        everyone = comm.exchange(rows.repeat(len(to), 1), send_counts, recv_counts, "rows of results").cpu().numpy()
        ids, column = everyone[:, 0].astype(np.int64), 1
        for name, width in zip(names, widths, strict=True):
            rows = everyone[:, column : column + width]
            self.arrays[name][ids] = rows.reshape(len(ids), *ROW_SHAPES[name])
            column += width
