"""What has gone wrong on one rank, told on all of them."""

from __future__ import annotations

from nvdd.communicator import Communicator
from nvdd.errors import InputError, NvddError


def raise_together(comm: Communicator, failure: Exception | None) -> None:
    """Raises the failure of the first rank that has one, on every rank; every rank calls it at once.

    Raises:
        InputError: that is what the failure is.
        NvddError: it is another; the message names it and its rank.
    """
    if comm.size == 1:
        if failure is not None:
            raise failure
        return
    told = None
    if failure is not None:
        told = (isinstance(failure, InputError), f"{type(failure).__name__}: {failure}", str(failure))
    for rank, found in enumerate(comm.all_gather_object(told, "failures")):
        if found is not None:
            is_input, named, text = found
            error = InputError(text) if is_input else NvddError(f"rank {rank}: {named}")
            error.on_all_ranks = True
            raise error from (failure if rank == comm.rank else None)
