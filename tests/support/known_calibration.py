"""A `Calibration` whose numbers are easy to work with."""

from __future__ import annotations

from nvdd.planning.calibration import Calibration, Cost, Network, Traffic

KNOWN = Calibration(
    machine="here",
    device="cpu",
    model="lj sigma=3.4",
    dtype="float64",
    strategy="halo",
    cutoff=6.0,
    seconds=Cost(0.02, 1e-6, 2e-6),
    alone=Cost(0.01, 1e-6, 1e-6),
    memory=Cost(1e6, 500.0, 100.0, 24.0),
    exchanges=(Traffic("h", 512.0), Traffic("forces", 24.0, 0.5)),
    reductions=2,
    network=Network(1e-4, 1e9, 2e-4, "2 ranks over gloo on this machine"),
    device_memory=2.0**33,
    samples=((64, 1408, 0.02, 1e6), (216, 4752, 0.05, 2e6)),
)
