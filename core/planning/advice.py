"""What an estimate means, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvdd.runtime.out_of_memory import gib, ranks_needed, savers

if TYPE_CHECKING:
    from nvdd.planning.estimate import RankPlan, RunEstimate

_GOOD = 0.8  # efficiency from which on more ranks are recommended
_UNEVEN = 1.25


def recommend(found: RunEstimate, what: str = "ranks") -> list[str]:
    """Sentences: how many ranks to take, what is too many, what does not fit, what is extrapolated."""
    fitting = [plan for plan in found.plans if plan.fits]
    lines = []
    if not fitting:
        lines.append(_nothing_fits(found))
    else:
        best = _best(fitting)
        lines.append(
            f"{best.n_ranks} {what if best.n_ranks > 1 else what.removesuffix('s')}: {milliseconds(best.seconds)} a step, {best.speedup:.2f} times one "
            f"rank (efficiency {best.efficiency:.2f}), {best.loads.owned.max()} atoms and {gib(best.memory)} on the fullest rank"
        )
        lines += _limits(found, best, what)
    uneven = [plan for plan in found.plans if plan.loads.imbalance > _UNEVEN]
    if uneven:
        first = uneven[0]
        lines.append(
            f"from {first.n_ranks} {what} on one rank has {first.loads.imbalance:.2f} times the mean of atoms: too few layers "
            "of atoms a domain, or empty space; balance='rcb' divides evenly"
        )
    return lines


def _best(plans: list[RankPlan]) -> RankPlan:
    """The most ranks that are still efficient; of one that fits only when divided, the fastest for its ranks."""
    good = [plan for plan in plans if plan.efficiency >= _GOOD]
    return good[-1] if good else max(plans, key=lambda plan: plan.efficiency)


def _limits(found: RunEstimate, best: RankPlan, what: str) -> list[str]:
    lines = []
    lost = [plan for plan in found.plans if plan.n_ranks > best.n_ranks and plan.efficiency < _GOOD]
    if lost:
        first = lost[0]
        lines.append(
            f"more than {best.n_ranks} {what} leave fewer than {round(found.n_atoms / best.n_ranks)} atoms a rank: with {first.n_ranks} the "
            f"efficiency is {first.efficiency:.2f}, {100 * first.exchange / first.seconds:.0f} % of a step in messages"
        )
    small = [plan for plan in found.plans if not plan.fits]
    if small:
        worst = small[-1]
        lines.append(
            f"{worst.n_ranks} {what if worst.n_ranks > 1 else what.removesuffix('s')} or fewer are too few: {gib(worst.memory)} of {gib(found.memory_limit)}"
        )
    return lines


def _nothing_fits(found: RunEstimate) -> str:
    last = found.plans[-1]
    needed = ranks_needed(last.memory, found.memory_limit, last.n_ranks)
    return (
        f"does not fit: {gib(last.memory)} of {gib(found.memory_limit)} a rank with {last.n_ranks}; about {needed} ranks are needed"
        + savers()
    )


def milliseconds(seconds: float) -> str:
    """``"12.3 ms"``."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
