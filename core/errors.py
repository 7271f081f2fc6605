"""The exceptions that nvdd raises. Each message says what happened and what to do about it."""

from __future__ import annotations

import sys


class _Explained(Exception):
    """Below the message, a traceback names the entry of docs/troubleshooting.md that explains it (Python 3.11 and newer)."""

    def __init__(self, *_message: object) -> None:
        super().__init__(*_message)
        if sys.version_info >= (3, 11) and (where := link_of(str(self))):
            self.add_note(where)


def link_of(message: str) -> str:
    """Where a message is explained, ``"docs/troubleshooting.md#..., nvdd explain ..."``; empty if nowhere in particular."""
    from nvdd.remedies import entry_of  # reads the page, at the first error

    entry = entry_of(message)
    return f"docs/troubleshooting.md#{entry.anchor}, or: nvdd explain {entry.anchor}" if entry else ""


class NvddError(_Explained, RuntimeError):
    """Base class of the errors that nvdd raises while it runs."""


class InputError(_Explained, ValueError):
    """An input that no rank can work with: the message names the value and the remedy."""


class MissingDependencyError(_Explained, ImportError):
    """A package that a model family needs is not installed; the message has the install command."""


class CommunicationError(NvddError):
    """An exchange between ranks failed or did not match on both sides."""


class DistributedOpError(NvddError):
    """An operation whose meaning over several ranks is unknown, so that its local result would be wrong.

    Args:
        message: what was called, why it is refused, what to do instead.

    Attributes:
        op: name of the torch operation.
        site: ``file:line in function`` of the model code that called it.
    """

    def __init__(self, message: str, op: str = "", site: str = "") -> None:
        super().__init__(message)
        self.op = op
        self.site = site


class RankError(NvddError):
    """A rank failed; raised once, in the user's process.

    Attributes:
        rank: the rank that failed first.
        phase: what it was doing (``"setup"``, ``"partition"``, ``"plan"``, ``"forward"``, ...).
        cause: the message of the error there.
        details: the traceback there, if there is one.
    """

    def __init__(self, rank: int, phase: str, cause: str, details: str = "") -> None:
        super().__init__(f"rank {rank} failed in phase '{phase}': {cause}")
        self.rank = rank
        self.phase = phase
        self.cause = cause
        self.details = details

    def __reduce__(self):
        return type(self), (self.rank, self.phase, self.cause, self.details)
