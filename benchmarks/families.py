"""Writes the table of model families into docs/models.md: parity with their own calculators, and what crosses ranks.

    ./dev python benchmarks/families.py                        # the families of the main environment
    ./dev family torchani python benchmarks/families.py        # one that has an environment of its own
    ./dev python benchmarks/families.py nequip allegro         # some of those that are installed

Each case of tests/support/family_<name>.py whose packages are installed is computed on 2 and 3 ranks of this machine with
each strategy, and compared with the family's own calculator in one process, without nvdd. Rows of other families stay as
they are.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families: written by benchmarks/families.py -->", "<!-- families: end -->"
HEAD = (
    "| family | package | type | layers | atoms | largest error of energy, relative | of forces, of the largest "
    "| exchanges a step | bytes sent per atom and step: halo | graph |\n|---|---|---|---|---|---|---|---|---|---|"
)
LARGE = {"quartz unit": "quartz bar", "organic": "organic bar"}  # long enough that not every atom is in a halo


def cases(wanted: list[str]) -> list[str]:
    """Names of the cases that can run here."""
    import families
    from nvdd.models import registry

    found = []
    for file in sorted(ROOT.glob("tests/support/family_*.py")):
        family = file.stem.removeprefix("family_")
        if (not wanted or family in wanted) and registry.families()[family].installed():
            found += __import__(file.stem).CASES
    assert families.STRATEGIES == ("halo", "graph"), "the columns of the table"
    return found


def row(name: str, pool) -> str:
    """Computes a case."""
    import numpy as np

    import families
    import parity
    from structures import structure

    case = families.case(name)
    of = LARGE.get(case.structure, case.structure)
    expected, n = families.reference(name, of), len(structure(of))
    energy, force, sent, exchanges = 0.0, 0.0, dict.fromkeys(families.STRATEGIES, "-"), set()
    for strategy in case.strategies:
        for ranks in (2, 3):
            parts = pool.run(ranks, parity.on_rank, f"family:{name}", of, {"strategy": strategy}, timeout=600.0)
            found = parity.assemble(parts, n)
            families.assert_parity(name, found, expected)
            energy = max(energy, abs(found.energy - expected.energy) / abs(expected.energy))
            force = max(force, np.abs(found.forces - expected.forces).max() / np.abs(expected.forces).max())
        traffic = pool.run(2, families.traffic_on_rank, name, of, strategy, timeout=600.0)
        exchanges.add(traffic[0]["exchanges"])
        sent[strategy] = f"{sum(part['bytes'] for part in traffic) / n:.0f}"
    kind = str(parity.wrapper(f"family:{name}").dtype).removeprefix("torch.")
    counts = ", ".join(map(str, sorted(exchanges)))
    layers = case.layers or "0, strictly local"
    return (
        f"| `{name}` | {version(name)} | {kind} | {layers} | {n} | {energy:.0e} | {force:.0e} | {counts} "
        f"| {sent['halo']} | {sent['graph']} |"
    )


def version(name: str) -> str:
    """The distribution of the family's package and its version."""
    from nvdd.models import registry

    package = registry.families()[name.partition("-")[0]].package
    (distribution, *_) = metadata.packages_distributions()[package]
    return f"{distribution} {metadata.version(distribution)}"


def write(rows: dict[str, str]) -> None:
    """Puts the rows into the page, in alphabetical order; rows of others stay."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    kept = {m[1]: m[0] for m in re.finditer(r"^\| `([^`]+)` \|.*$", old, flags=re.MULTILINE)}
    lines = [line for _, line in sorted((kept | rows).items())]
    PAGE.write_text("\n".join([before + BEGIN, "", HEAD, *lines, "", END + after]))


def main() -> int:
    """Computes, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="default: all that are installed here")
    wanted = parser.parse_args().families
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    os.environ["PYTHONPATH"] = str(ROOT / "tests" / "support")
    warnings.simplefilter("ignore")
    from rank_pool import RankPool

    pool, rows = RankPool(3), {}
    try:
        for name in cases(wanted):
            rows[name] = row(name, pool)
            print(rows[name], flush=True)
    finally:
        pool.close()
    write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
