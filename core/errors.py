"""The exceptions that nvdd raises. Each message says what happened and what to do about it."""

from __future__ import annotations


class NvddError(RuntimeError):
    """Base class of the errors that nvdd raises while it runs."""


class InputError(ValueError):
    """An input that no rank can work with: the message names the value and the remedy."""


class MissingDependencyError(ImportError):
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
