"""Models in which a fault is planted: what, on which rank, in which phase, the how-manieth time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from nvdd.models.lj import LennardJonesModelWrapper

FAULTS = ("kill", "raise", "memory", "stop", "skip")
PHASES = ("partition", "plan", "forward", "backward", "consolidate")


class Planted:
    """Fails when phase ``phase`` begins for the ``call``-th time (from 1) on rank ``rank``.

    The moment, ``time.monotonic()``, goes to the file that PLANTED_STAMP names.
    """

    plan: tuple[str, str, int, int]

    def distributed_setup(self, ctx: Any) -> None:
        """Listens to the phases that the framework reports."""
        fault, phase, rank, call = self.plan
        seen = 0

        def watch(name: str) -> None:
            nonlocal seen
            seen += name == phase
            if seen == call and name == phase and ctx.comm.rank == rank:
                seen += 1
                self._strike(fault, ctx.comm)

        ctx.on_phase.append(watch)

    @staticmethod
    def _strike(fault: str, comm: Any) -> None:
        if "PLANTED_STAMP" in os.environ:
            Path(os.environ["PLANTED_STAMP"]).write_text(str(time.monotonic()))
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "raise":
            raise ValueError("a planted error")
        elif fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB (planted)")
        elif fault == "skip":
            exchange = comm.exchange

            def skip_once(send, send_counts, recv_counts, site, setup=False):
                comm.exchange = exchange
                return send.new_zeros((sum(recv_counts), *send.shape[1:]))

            comm.exchange = skip_once


class Faulty(Planted, LennardJonesModelWrapper):
    """Lennard-Jones argon with a planted fault."""

    def __init__(self, fault: str, phase: str, rank: int, call: int) -> None:
        super().__init__(epsilon=0.0104, sigma=3.4, cutoff=8.5)
        self.plan = (fault, phase, rank, call)


def faulty_mace(fault: str, phase: str, rank: int, call: int):
    """A small random MACE for argon with a planted fault: several exchanges a step."""
    from builders import random_mace
    from nvdd.models.mace import MACEWrapper

    class FaultyMACE(Planted, MACEWrapper):
        pass

    model = FaultyMACE(random_mace(elements=(18,), r_max=5.0)).requires_grad_(False)
    model.plan = (fault, phase, rank, call)
    return model
