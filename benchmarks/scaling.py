r"""Scaling tables: one case a YAML file, one row for each system, way to run it, mode and number of ranks.

    python benchmarks/scaling.py benchmarks/cases/mace_quartz.yaml --ranks 1,2
    python benchmarks/scaling.py benchmarks/cases/*.yaml --device cpu --ranks 1,2 --smallest --output rows.jsonl
    python benchmarks/scaling.py --plot scaling.png rows.jsonl

A row has ms a step, katom-steps/s, ns/day, speed-up and efficiency beside the fewest ranks of its system, peak memory,
bytes and exchanges of a step, and **the largest difference of a force from that of the fewest ranks**. Each number of
ranks is a run of torchrun (of mpirun for LAMMPS) in which every system of the case is timed, so that rows of one system
come from one minute of one machine. Rows that do not fit into memory say so. Exit code 1 if a force is off by more than
the case's ``limit`` (eV/A).

A case::

    name: mace quartz
    model: mace-random              # or a model as users name it: sevenn:7net-0, lj, ewald ...
    options: {hidden: 128x0e+128x1o}
    structure: quartz               # quartz, argon, salt, water
    dtype: float32
    strong: [4032, 11979]           # atoms
    weak: [4000]                    # atoms a rank
    fronts: [forward, ase, md]      # the bare evaluation, NVDDCalculator, DomainParallel, lammps
    strategies: [halo, graph]       # graph: of the front forward alone
    modes: [eager, cudagraphs]      # what DomainConfig(compile=) takes
    timestep: 0.5                   # fs, for ns/day
    limit: 2.0e-6
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
sys.path.insert(0, str(Path(__file__).parent))


@dataclass
class Case:
    """What a YAML file says; see the docstring of the file."""

    name: str
    model: str
    structure: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    strong: list[int] = field(default_factory=list)
    weak: list[int] = field(default_factory=list)
    fronts: list[str] = field(default_factory=lambda: ["forward"])
    strategies: list[str] = field(default_factory=lambda: ["halo"])
    modes: list[str] = field(default_factory=lambda: ["eager"])
    timestep: float = 0.5
    limit: float = 2e-6

    def systems(self, ranks: int) -> list[tuple[str, int]]:
        """("strong", atoms) and ("weak", atoms) of a run on so many ranks."""
        return [("strong", n) for n in self.strong] + [("weak", n * ranks) for n in self.weak]


# --- systems ----------------------------------------------------------------------------------------------------


def structure(kind: str, n_atoms: int):
    """About ``n_atoms`` atoms in a box that is nearly a cube, rattled, the same for the same number."""
    from ase.build import bulk, molecule
    from ase.spacegroup import crystal

    if kind == "quartz":
        sites = [(0.4697, 0, 2 / 3), (0.4135, 0.2669, 0.7858)]
        cell = crystal(["Si", "O"], sites, spacegroup=154, cellpar=[4.913, 4.913, 5.405, 90, 90, 120])
    elif kind == "argon":
        cell = bulk("Ar", "fcc", a=5.4, cubic=True)
    elif kind == "salt":
        cell = bulk("NaCl", "rocksalt", a=5.64, cubic=True)
        cell.set_initial_charges([1.0, -1.0] * 4)
    elif kind == "water":  # a molecule a cube of 3.105 A: 1 g/cm3; eight that point elsewhere
        cell = molecule("H2O", cell=[3.105] * 3, pbc=True).repeat(2)
        for k in range(8):
            one = cell[3 * k : 3 * k + 3]
            one.rotate(45 * k, (1, k % 3, 1), center=one.positions[0])
            cell.positions[3 * k : 3 * k + 3] = one.positions
    else:
        raise SystemExit(f"no structure {kind!r}: quartz, argon, salt, water")
    atoms = cell.repeat(repeats(cell.cell.lengths(), len(cell), n_atoms))
    atoms.rattle(0.05, seed=1)
    return atoms


def repeats(lengths: np.ndarray, n_cell: int, n_atoms: int) -> tuple[int, int, int]:
    """Repeats of a cell: the nearest to ``n_atoms`` among boxes whose sides differ by less than one and a half cells."""
    side = (np.prod(lengths) * max(1.0, n_atoms / n_cell)) ** (1 / 3)
    choices = [[max(1, int(side / x) + d) for d in (-1, 0, 1, 2)] for x in lengths]
    best = min(
        ((a, b, c) for a in choices[0] for b in choices[1] for c in choices[2]),
        key=lambda r: (abs(n_cell * np.prod(r) - n_atoms) > 0.05 * n_atoms, np.ptp(np.array(r) * lengths),
                       abs(n_cell * np.prod(r) - n_atoms)),
    )  # fmt: skip
    return best


def make_wrapper(case: Case, device):
    """The model of a case on a device."""
    import torch

    dtype = getattr(torch, case.dtype)
    if case.model == "mace-random":
        from mace_scaling import build_model

        from nvdd.models.mace import MACEWrapper

        elements = tuple(case.options.get("elements", (8, 14)))
        model = build_model(case.options.get("hidden", "128x0e + 128x1o"), dtype, elements)
        if case.options.get("enable_cueq"):
            from nvdd.models.mace_cueq import convert

            model = convert(model)
        torch.set_default_dtype(torch.float32)
        return MACEWrapper(model.to(device)).requires_grad_(False)
    from nvdd.models.registry import load

    return load(case.model, dtype=dtype, **case.options).to(device)


# --- one row, on every rank -------------------------------------------------------------------------------------


def run_forward(case: Case, atoms, comm, mode: str, strategy: str, times) -> tuple[float, np.ndarray, dict]:
    """`DistributedModel`: energy and forces from positions on the host."""
    from nvdd import Batch, DistributedModel, DomainConfig, dispatch_trace

    model = DistributedModel(
        make_wrapper(case, comm.device), DomainConfig(mesh=comm, compile=compile_of(mode), strategy=strategy)
    )
    batch = Batch.from_atoms(atoms)
    try:
        with dispatch_trace() as trace:  # the first step also builds plans, whose messages are counted apart
            model(batch)
        seconds = times(lambda: model(batch))
        out = model(batch)
        forces = np.zeros((len(atoms), 3))
        forces[out.ids.cpu().numpy()] = out["forces"].cpu().numpy()
        counted = {"exchanges": trace.n_exchanges, "bytes": trace.bytes_sent, "owned": len(out.ids), "halo": out.n_halo}
        return seconds, forces, counted
    finally:
        model.close()


def run_ase(case: Case, atoms, comm, mode: str, strategy: str, times) -> tuple[float, np.ndarray, dict]:
    """A whole step of ASE: VelocityVerlet with `NVDDCalculator`, the same script on every rank."""
    from ase import units
    from ase.md.verlet import VelocityVerlet

    from nvdd_ase import NVDDCalculator

    with NVDDCalculator(
        make_wrapper(case, comm.device), spmd="replicated" if comm.size > 1 else "off", device=str(comm.device),
        compile=compile_of(mode), strategy=strategy,
    ) as calculator:  # fmt: skip
        atoms.calc = calculator
        forces = atoms.get_forces()
        md = VelocityVerlet(atoms, case.timestep * units.fs)
        return times(lambda: md.run(1)), forces if comm.rank == 0 else np.zeros_like(forces), {}


def run_md(case: Case, atoms, comm, mode: str, strategy: str, times) -> tuple[float, np.ndarray, dict]:
    """A whole step of `DomainParallel`, NVE, migration included."""
    from nvdd import NVE, Batch, DomainConfig, DomainParallel

    config = DomainConfig(mesh=comm, compile=compile_of(mode))
    run = DomainParallel(NVE(case.timestep), make_wrapper(case, comm.device), config)
    try:
        run.partition(Batch.from_atoms(atoms) if comm.rank == 0 else None)
        run.start()
        rows = run.batch.gather_rows(["forces"])
        forces = np.zeros((len(atoms), 3)) if rows is None else rows["forces"].cpu().numpy()
        return times(lambda: run.run(1)), forces, {}
    finally:
        run.close()


FRONTS = {"forward": run_forward, "ase": run_ase, "md": run_md}


def compile_of(mode: str) -> bool | str:
    """A mode as `DomainConfig(compile=)` takes it."""
    return {"eager": False, "compiled": True}.get(mode, mode)


def worker(options) -> None:
    """One number of ranks: every system, front and mode of the case; rank 0 writes rows."""
    import torch
    import torch.distributed as dist

    from nvdd.communicator import Communicator

    case = Case(**json.loads(Path(options.worker).read_text()))
    rank, size, local = (int(os.environ.get(k, v)) for k, v in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    group = None
    if size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        group = dist.group.WORLD
    comm = Communicator(group, device)
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def times(step) -> float:
        """Median seconds."""
        found = []
        for k in range(options.warm_up + options.repeats):
            sync()
            start = time.perf_counter()
            step()
            sync()
            if k >= options.warm_up:
                found.append(time.perf_counter() - start)
        return statistics.median(found)

    for scaling, n in case.systems(size):
        for front in (f for f in case.fronts if f in FRONTS):
            for strategy in case.strategies if front == "forward" else ["halo"]:
                for mode in case.modes:
                    row: dict[str, Any] = {"case": case.name, "scaling": scaling, "front": front, "strategy": strategy,
                                           "mode": mode, "ranks": size}  # fmt: skip
                    atoms = structure(case.structure, n)
                    forces, mine = None, {}
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
                        torch.cuda.reset_peak_memory_stats()
                    try:
                        seconds, forces, counted = FRONTS[front](case, atoms, comm, mode, strategy, times)
                        mine = {"seconds": seconds, **counted}
                    except Exception as error:  # the same on all ranks; the other rows are still wanted
                        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                    if device.type == "cuda":
                        mine["gib"] = torch.cuda.max_memory_allocated() / 2**30
                    parts = comm.all_gather_object((mine, forces))
                    if rank == 0:
                        write_row(options, row, len(atoms), parts, case)
    if group is not None:
        dist.destroy_process_group()


def write_row(options, row: dict, n_atoms: int, parts: list, case: Case) -> None:
    """The row of all ranks into the file, and the forces beside it."""
    row["atoms"] = n_atoms
    if "error" not in row:
        most = lambda key: max((p[0].get(key, 0) for p in parts), default=0)
        seconds = most("seconds")
        row |= {"ms": 1e3 * seconds, "katom_steps_s": n_atoms / seconds / 1e3,
                "ns_day": case.timestep * 1e-6 * 86400 / seconds, "exchanges": most("exchanges"),
                "mb_sent": most("bytes") / 1e6, "gib": most("gib"), "halo": most("halo")}  # fmt: skip
        forces = sum(p[1] for p in parts)
        np.save(force_file(options.folder, row), forces)
    with open(Path(options.folder) / "rows.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    ms = f"{row['ms']:.2f} ms" if "ms" in row else row["error"]
    print(f"{row['case']}: {n_atoms} atoms, {row['ranks']} ranks, {row['front']}, {row['strategy']}, {row['mode']}: {ms}",
          flush=True)  # fmt: skip


def force_file(folder: str, row: dict) -> Path:
    """Where the forces of a row are."""
    name = "-".join(str(row[k]) for k in ("case", "scaling", "atoms", "front", "strategy", "mode", "ranks"))
    return Path(folder) / f"{name.replace(' ', '_').replace('/', '_')}.npy"


# --- the driver -------------------------------------------------------------------------------------------------


def run_case(case: Case, ranks: list[int], options, folder: Path) -> list[dict]:
    """All rows of a case."""
    spec = folder / "case.json"
    spec.write_text(json.dumps(asdict(case)))
    for n in ranks:
        launch = [sys.executable, __file__] if n == 1 else [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), __file__]  # fmt: skip
        command = [*launch, "--worker", str(spec), "--folder", str(folder), "--device", options.device,
                   "--warm-up", str(options.warm_up), "--repeats", str(options.repeats)]  # fmt: skip
        code = subprocess.run(command, timeout=options.timeout).returncode
        if code:
            print(f"{case.name} on {n} ranks ended with {code}", file=sys.stderr, flush=True)
        if "lammps" in case.fronts:
            lammps_rows(case, n, options, folder)
    with open(folder / "rows.jsonl") as file:
        rows = [json.loads(line) for line in file]
    compare(rows, folder)
    return rows


def lammps_rows(case: Case, ranks: int, options, folder: Path) -> None:
    """LAMMPS with the plugin, under mpirun."""
    import types

    import torch
    from ase.calculators.lammps import Prism
    from ase.io import write
    from lammps_gpu import lammps
    from mace_scaling import build_model

    from nvdd_lammps import export_model

    if case.structure != "quartz" or "eager" not in case.modes:
        raise SystemExit("the front lammps runs quartz, eager")
    os.environ["NVDD_DEVICE"] = options.device
    model, given = case.model, case.options
    if model == "mace-random":
        torch.save(build_model(given.get("hidden", "128x0e + 128x1o"), getattr(torch, case.dtype)), folder / "m.model")
        torch.set_default_dtype(torch.float32)
        model, given = f"mace:{folder / 'm.model'}", {}
    export_model(model, folder / "quartz.nvdd", elements=["O", "Si"], **given)
    settings = types.SimpleNamespace(warm_up=options.warm_up, steps=options.repeats, timeout=options.timeout)
    for scaling, n in case.systems(ranks):
        atoms = structure("quartz", n)
        atoms.wrap()
        write(folder / "quartz.data", atoms, format="lammps-data", specorder=["O", "Si"])
        row: dict[str, Any] = {"case": case.name, "scaling": scaling, "front": "lammps", "strategy": "halo", "mode": "eager",
                               "ranks": ranks}  # fmt: skip
        forces, mine = None, {}
        try:
            seconds, forces = lammps(folder, ranks, settings)
            forces, mine = Prism(atoms.cell.array).vector_to_ase(forces), {"seconds": seconds}
        except (SystemExit, subprocess.TimeoutExpired) as error:
            row["error"] = str(error).splitlines()[0][:300]
        settings.folder = str(folder)
        write_row(settings, row, len(atoms), [(mine, forces)], case)


def compare(rows: list[dict], folder: Path) -> None:
    """Speed-up, efficiency and force differences, beside the fewest ranks of the same system."""
    done = [r for r in rows if "ms" in r]
    for row in done:
        same = lambda r, keys, row=row: all(r[k] == row[k] for k in keys)
        family = [r for r in done if same(r, ("case", "scaling", "front", "strategy", "mode"))]
        if row["scaling"] == "weak":  # as many atoms a rank
            alike = [r for r in family if abs(r["atoms"] / r["ranks"] / (row["atoms"] / row["ranks"]) - 1) < 0.3]
            first = min(alike, key=lambda r: r["ranks"])
            row["efficiency"] = row["katom_steps_s"] / row["ranks"] / (first["katom_steps_s"] / first["ranks"])
        else:
            first = min((r for r in family if r["atoms"] == row["atoms"]), key=lambda r: r["ranks"])
            row["speed_up"] = first["ms"] / row["ms"] * first["ranks"]
            row["efficiency"] = row["speed_up"] / row["ranks"]
        # forces: of the plainest row of these atoms
        plain = min((r for r in done if same(r, ("case", "atoms"))),
                    key=lambda r: (r["ranks"], r["front"] != "forward", r["mode"] != "eager", r["strategy"] != "halo"))  # fmt: skip
        mine, exact = (np.load(force_file(folder, r)) for r in (row, plain))
        row["dF"], row["F"] = float(np.abs(mine - exact).max()), float(np.abs(exact).max())


def table(rows: list[dict]) -> str:
    """Rows as Markdown."""
    head = ("case", "scaling", "atoms", "front", "strategy", "mode", "ranks", "ms/step", "katom-steps/s", "ns/day", "speed-up",
            "efficiency", "GiB", "MB sent", "exchanges", "max force difference (eV/A)")  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        start = [r["case"], r["scaling"], str(r["atoms"]), r["front"], r["strategy"], r["mode"], str(r["ranks"])]
        if "ms" not in r:
            lines.append("| " + " | ".join([*start, r["error"], *[""] * 8]) + " |")
            continue
        number = lambda key, form, r=r: form.format(r[key]) if r.get(key) else ""
        lines.append("| " + " | ".join([
            *start, f"{r['ms']:.2f}", f"{r['katom_steps_s']:.1f}", f"{r['ns_day']:.3f}", number("speed_up", "{:.2f}"),
            f"{r['efficiency']:.3f}", number("gib", "{:.1f}"), number("mb_sent", "{:.2f}"), number("exchanges", "{:d}"),
            f"{r['dF']:.0e} of {r['F']:.2g}"]) + " |")  # fmt: skip
    return "\n".join(lines)


def plot(rows: list[dict], path: str) -> None:
    """Efficiency and time a step against ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    groups: dict[tuple, list[dict]] = {}
    for r in rows:
        if "ms" in r:
            atoms = r["atoms"] if r["scaling"] == "strong" else round(r["atoms"] / r["ranks"], -2)
            groups.setdefault((r["case"], r["scaling"], atoms, r["front"], r["strategy"], r["mode"]), []).append(r)
    for key, group in groups.items():
        group.sort(key=lambda r: r["ranks"])
        label = f"{key[0]}, {key[2]:g} atoms{' a rank' if key[1] == 'weak' else ''}, {key[3]}, {key[5]}"
        left.plot([r["ranks"] for r in group], [r["ms"] for r in group], "o-", label=label)
        right.plot([r["ranks"] for r in group], [r["efficiency"] for r in group], "o-")
    left.set(xlabel="ranks", ylabel="ms a step", xscale="log", yscale="log")
    right.set(xlabel="ranks", ylabel="parallel efficiency", xscale="log", ylim=(0, 1.15))
    right.axhline(1.0, color="grey", lw=0.8)
    ticks = sorted({r["ranks"] for r in rows})
    for axes in (left, right):
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.minorticks_off()
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", fontsize=7, ncols=2)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="cases (YAML), or with --plot rows (JSON lines)")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--atoms", help="these systems only, instead of the case's: 576,4032")
    parser.add_argument("--fronts", help="instead of the case's: forward,md")
    parser.add_argument("--modes", help="instead of the case's: eager,cudagraphs")
    parser.add_argument("--smallest", action="store_true", help="the smallest system of each kind only")
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one number of ranks (%(default)g)")
    parser.add_argument("--output", help="append rows (JSON lines) to this file")
    parser.add_argument("--plot", help="a picture of the rows")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return 0
    rows: list[dict] = []
    off = False
    for file in options.files:
        if file.endswith(".jsonl"):
            rows += [json.loads(line) for line in Path(file).read_text().splitlines()]
            continue
        import yaml

        case = Case(**yaml.safe_load(Path(file).read_text()))
        if options.atoms:
            case.strong, case.weak = [int(n) for n in options.atoms.split(",")], []
        case.fronts = options.fronts.split(",") if options.fronts else case.fronts
        case.modes = options.modes.split(",") if options.modes else case.modes
        if options.smallest:
            case.strong, case.weak = sorted(case.strong)[:1], sorted(case.weak)[:1]
        with tempfile.TemporaryDirectory() as folder:
            found = run_case(case, [int(n) for n in options.ranks.split(",")], options, Path(folder))
        off = off or any(r.get("dF", 0) > case.limit for r in found)
        rows += found
        if options.output:
            with open(options.output, "a") as out:
                out.writelines(json.dumps(r) + "\n" for r in found)
    print("\n" + table(rows))
    if options.plot:
        plot(rows, options.plot)
    return int(off)


if __name__ == "__main__":
    sys.exit(main())
