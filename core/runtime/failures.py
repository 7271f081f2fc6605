"""What went wrong on a rank: described there, and the one that matters chosen and raised in the parent."""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ..errors import CommunicationError, DistributedOpError, InputError, MissingDependencyError, RankError

# Errors of the user's input rather than faults of a rank: raised in the parent as what they are.
USER_ERRORS = (InputError, MissingDependencyError, DistributedOpError)

# The torch exceptions of a collective whose peer is gone have no common class (gloo raises a bare RuntimeError).
_BACKEND_ERRORS = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
_BACKEND_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "gloo/transport",
    "gloo::",
    "nccl communicator was aborted",
    "nccl error",
    "timed out waiting",
)


class Blame(IntEnum):
    """How likely a failure is to be the first cause; the smaller, the likelier."""

    OWN = 0  # the rank's own error, or its sudden death
    ABORTED = 1  # SIGABRT: also how NCCL's watchdog ends a rank whose peer failed
    EXCHANGE = 2  # nvdd's CommunicationError
    BACKEND = 3  # a collective that failed, mostly since a peer did


@dataclass
class Failure:
    """One rank's failure. ``exception`` is the pickled exception if it is one of ``USER_ERRORS``."""

    rank: int
    phase: str
    cause: str
    details: str = ""
    blame: Blame = Blame.OWN
    exception: bytes | None = None
    hints: list[str] = field(default_factory=list)


def from_exception(rank: int, phase: str, error: BaseException) -> Failure:
    """Describes, on the rank, an exception of the service."""
    exception = None
    if isinstance(error, USER_ERRORS):
        exception = _pickled(error)
    return Failure(
        rank=rank,
        phase=phase,
        cause=f"{type(error).__name__}: {error}".rstrip(": "),
        details="".join(traceback.format_exception(error)),
        blame=_blame(error),
        exception=exception,
    )


def from_exit(rank: int, phase: str, returncode: int | None) -> Failure:
    """Describes, in the parent, a rank that is gone; ``returncode`` is that of ``subprocess.Popen``."""
    if returncode is None:
        return Failure(rank, phase, "it closed its connection to the parent")
    if returncode >= 0:
        return Failure(rank, phase, f"exited with code {returncode}")
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "unknown"
    failure = Failure(rank, phase, f"killed by signal {-returncode} ({name})")
    if -returncode == signal.SIGABRT:
        failure.blame = Blame.ABORTED
    if -returncode == signal.SIGKILL:
        failure.hints.append("Linux does this when memory runs out: if so, fewer atoms, or fewer ranks on this machine")
    return failure


def primary(failures: Sequence[Failure]) -> Failure:
    """The failure to report: the likeliest cause, and of equal ones the first that arrived."""
    return min(failures, key=lambda failure: failure.blame)


def to_error(failures: Sequence[Failure], n_ranks: int) -> BaseException:
    """The exception to raise in the parent for failures in order of arrival."""
    first = primary(failures)
    error = _user_error(first)
    if error is None:
        error = RankError(first.rank, first.phase, first.cause, first.details)
        if first.details:
            _add_note(error, f"On rank {first.rank}:\n{first.details.rstrip()}")
    else:
        _add_note(error, f"raised on rank {first.rank} of {n_ranks} in phase '{first.phase}'")
    # Failed collectives are left out: they say no more than that a peer is gone.
    others = [
        f"rank {f.rank} in phase '{f.phase}': {f.cause}"
        for f in failures
        if f is not first and f.blame is not Blame.BACKEND
    ]
    if others:
        _add_note(error, "also failed: " + "; ".join(others))
    for hint in first.hints:
        _add_note(error, hint)
    return error


def _blame(error: BaseException) -> Blame:
    """Looks through the chain: a failed collective may have been wrapped on its way up."""
    blame = Blame.OWN
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, CommunicationError):
            blame = Blame.EXCHANGE
        text = str(link).lower()
        if type(link).__name__ in _BACKEND_ERRORS or (
            isinstance(link, RuntimeError | OSError) and any(message in text for message in _BACKEND_MESSAGES)
        ):
            return Blame.BACKEND
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return blame


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error, protocol=5)
        pickle.loads(data)  # an exception with its own __init__ often pickles but does not load
    except Exception:
        base = next(kind for kind in USER_ERRORS if isinstance(error, kind))
        data = pickle.dumps(base(str(error)), protocol=5)
    return data


def _user_error(failure: Failure) -> BaseException | None:
    if failure.exception is None:
        return None
    try:
        return pickle.loads(failure.exception)
    except Exception:  # its class can't be imported in the parent: the RankError has all of its text
        return None


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]
