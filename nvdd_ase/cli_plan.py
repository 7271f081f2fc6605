"""`nvdd plan`: how a structure would distribute over numbers of ranks, before a run."""

from __future__ import annotations

import functools
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvdd.errors import InputError
from nvdd_ase import cli_input as given
from nvdd_ase import cli_report as report
from nvdd_ase.cli_options import Debug, Device, Dtype, File, GraphPlan, Index, Model, Options, Skin, Strategy

if TYPE_CHECKING:
    from nvdd.planning.calibration import Calibration
    from nvdd.planning.estimate import RunEstimate

RankList = Annotated[str, typer.Option("--ranks", metavar="N,N,...", help="Numbers of ranks, up to 4096.")]
Repeat = Annotated[str, typer.Option(metavar="A,B,C", help="Repeat the cell so often along its vectors, without building it.")]
Balance = Annotated[str, typer.Option(metavar="auto|grid|rcb", help="How domains are made.")]
Memory = Annotated[float | None, typer.Option(help="GiB of a rank; by default this machine's.")]
Latency = Annotated[float | None, typer.Option(help="Of a message in your network, in microseconds; by default measured.")]
Bandwidth = Annotated[float | None, typer.Option(help="Of a rank in your network, in GB/s; by default measured.")]
CalibrationFile = Annotated[
    Path | None, typer.Option("--calibration", help="JSON file in which measurements are kept, and found again.")
]
Picture = Annotated[Path | None, typer.Option("--plot", help="Draw domains and scaling to this .png, .pdf or .svg file.")]


@report.readable_errors
def plan(
    file: File,
    model: Model,
    option: Options = None,
    ranks: RankList = "1,2,4,8",
    repeat: Repeat = "1,1,1",
    device: Device = None,
    dtype: Dtype = None,
    skin: Skin = 0.5,
    strategy: Strategy = "halo",
    graph_plan: GraphPlan = "curve",
    balance: Balance = "auto",
    memory: Memory = None,
    latency: Latency = None,
    bandwidth: Bandwidth = None,
    calibration: CalibrationFile = None,
    index: Index = "-1",
    plot: Picture = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")] = False,
    debug: Debug = False,
) -> None:
    """Say, before a run, what each rank would own, read, hold and take, and how many ranks to use."""
    from nvdd_ase.plots import check_plot

    options = given.parse_options(option or [])
    given.check_calculator_options(1, dtype, skin, strategy, graph_plan)
    if balance not in ("auto", "grid", "rcb"):
        raise InputError(f"unknown --balance {balance!r}; choose one of auto, grid, rcb")
    numbers, times = given.parse_counts("ranks", ranks), given.parse_counts("repeat", repeat)
    atoms = given.read_structure(file, index)
    if plot:
        check_plot(plot)
        given.check_output("--plot", plot, file)
    if calibration:
        given.check_output("--calibration", calibration, file, (".json",))

    from nvdd.models.composed import normal_options
    from nvdd.models.registry import check
    from nvdd.planning.estimate import check_limits, checked_ranks, estimate
    from nvdd.planning.tiles import TiledStructure

    options = normal_options(model, options)
    check(model, options)
    check_limits(memory, latency, bandwidth)
    checked_ranks(numbers, TiledStructure.of(atoms, times).n_atoms)
    domain = {"skin": skin, "strategy": strategy, "graph_plan": graph_plan}
    measured = _calibrate(atoms, model, options, device, dtype, domain, calibration)
    found = estimate(
        None, atoms, numbers, repeat=times, balance=balance, calibration=measured, **domain,
        memory=None if memory is None else memory * 2**30,
        latency=None if latency is None else latency * 1e-6,
        bandwidth=None if bandwidth is None else bandwidth * 1e9,
    )  # fmt: skip
    if as_json:
        print(json.dumps({"file": str(file), **found.as_dict()}, indent=1))
    else:
        _print(found, file, model)
    if plot:
        from nvdd_ase.plots_plan import plot_plan

        plot_plan(found, plot, title=f"{file.name}, {model}")
        if not as_json:
            report.say(f"plot        {plot}")


def _calibrate(
    atoms: Any, model: str, options: dict[str, Any], device: str | None, dtype: str | None, domain: dict[str, Any], file: Path | None
) -> Calibration:
    """That of the file, or a new one, which the file then has too."""
    import torch

    from nvdd.models.registry import load as load_model
    from nvdd.planning.calibration import load, save
    from nvdd.planning.estimate import strategy_name
    from nvdd.planning.measure import calibrate

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    further = [f"dtype={dtype}"] if dtype else []
    further += [f"skin={domain['skin']:g}"] if domain["skin"] != 0.5 else []
    name = " ".join([model, *(f"{key}={value}" for key, value in sorted(options.items())), *further])
    place = "cpu" if device == "cpu" else torch.cuda.get_device_name(device)
    if file is not None and (known := load(file, platform.node(), place, name, strategy_name(domain))) is not None:
        return known
    factory = functools.partial(load_model, model, dtype=getattr(torch, dtype) if dtype else None, **options)
    with report.err.status("measuring steps and messages on two local ranks"):
        found = calibrate(factory, atoms, device, domain=domain, name=name)
    if file is not None:
        save(found, file)
    return found


def _print(found: RunEstimate, file: Path, model: str) -> None:
    from nvdd.planning.advice import milliseconds, recommend
    from nvdd.runtime.out_of_memory import gib

    measured, tiled = found.calibration, found.tiled
    what = "GPUs" if measured.device != "cpu" else "ranks"
    times = "" if tiled.n_cells == 1 else f" repeated {' x '.join(map(str, tiled.repeat))}"
    widths = " + ".join(f"{e.bytes_per_row * e.share:.0f}" for e in measured.exchanges) or "0"
    report.say(f"structure   {file}{times}: {found.n_atoms} atoms, {found.n_edges} edges within {measured.cutoff:g} A")
    report.say(
        f"model       {model}, {measured.dtype}: {_count(len(measured.exchanges), 'exchange')} and {_count(measured.reductions, 'sum')} a step, "
        f"{widths} bytes a halo row"
    )
    largest = max(measured.samples)
    report.say(
        f"measured    on {measured.machine} ({measured.device}): steps of {min(measured.samples)[0]} to {largest[0]} atoms, the largest "
        f"{milliseconds(largest[2])} and {gib(largest[3])}"
    )
    network = measured.network
    report.say(
        f"messages    {network.measured}: {1e6 * network.latency:.0f} us + bytes / {network.bandwidth / 1e9:.3g} GB/s an exchange, "
        f"{milliseconds(network.reduction)} a sum, {milliseconds(network.overhead)} a step"
    )
    report.say("counted     atoms, halo rows, edges; extrapolated: memory and time beyond what was measured, more than 2 ranks")
    rows = [_HEAD, *map(_row, found.plans)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    report.say("")
    for row in rows:
        report.say("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
    report.say("")
    for line in recommend(found, what):
        report.say(f"advice      {line}")


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


_HEAD = ("ranks", "domains", "atoms min/mean/max", "halo", "imbal.", "edges", "kB/exch.", "memory", "ms/step", "in msgs", "speed-up", "eff.", "most atoms")  # fmt: skip


def _row(plan: Any) -> tuple[str, ...]:
    from nvdd.runtime.out_of_memory import gib

    loads = plan.loads
    mean = plan.bytes_per_step / max(1, len(plan.bytes_per_exchange))
    return (
        str(plan.n_ranks),
        "x".join(map(str, loads.grid)) if loads.grid else loads.how,
        f"{loads.owned.min()}/{loads.owned.mean():.0f}/{loads.owned.max()}",
        str(loads.halo.max()),
        f"{loads.imbalance:.2f}",
        str(loads.edges.max()),
        f"{mean / 1e3:.4g}",
        gib(plan.memory) + ("" if plan.fits else " !"),
        f"{1e3 * plan.seconds:.4g}",
        f"{100 * plan.exchange / plan.seconds:.0f} %",
        f"{plan.speedup:.2f}",
        f"{plan.efficiency:.2f}",
        f"{plan.most_atoms:.3g}" if plan.most_atoms >= 1e6 else str(plan.most_atoms),
    )
