"""`Check`: one finding of `nvdd doctor`."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, MISSING = "ok", "warning", "missing"


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        status: ``"ok"``, ``"warning"`` (works, but not well or not everywhere) or ``"missing"``.
        value: what was found.
        remedy: what to do about it; empty if nothing.
        essential: whether nvdd can't be used at all while this is missing.
    """

    name: str
    status: str
    value: str
    remedy: str = ""
    essential: bool = False
