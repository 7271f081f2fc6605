"""Real rank processes that outlive one validation, so that several models need no new ones."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

from nvdd.runtime.local_ranks import LocalRanks
from nvdd.validate.rank_side import RankResult, Request, load_records

SERVICE = "nvdd.validate.rank_side:ModelRanks"


class RanksFailed(Exception):
    """A rank raised. The cause is the exception that the ranks report; ``records`` what they had found until then."""

    def __init__(self, error: BaseException, records: list[list[RankResult]] | None) -> None:
        super().__init__(str(error))
        self.error, self.records = error, records


class ValidationSession:
    """Ranks for any number of validations::

        with ValidationSession(world_size=2) as session:
            for factory in factories:
                report = trace_and_validate(factory, sample, session=session)

    They start at the first use and again after a failure, which ends them.

    Args:
        world_size: number of ranks; several share a GPU if ``device`` is ``"cuda:0"``.
        device: ``"cpu"``, ``"cuda"`` (rank i takes GPU i modulo their number), ``"cuda:k"``.
        timeout: seconds for one attempt, after which ranks count as waiting for each other.
        service: ``module:Class`` of what the ranks do; a subclass of `nvdd.validate.rank_side.ModelRanks`.
        service_kwargs: further arguments of it.
    """

    def __init__(
        self,
        world_size: int = 2,
        device: str = "cpu",
        timeout: float = 120.0,
        service: str = SERVICE,
        service_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.world_size, self.device, self.timeout = world_size, str(device), timeout
        self.service, self.service_kwargs = service, dict(service_kwargs or {})
        self._ranks: LocalRanks | None = None

    def call(self, method: str, payload: Any = None) -> list[Any]:
        """``service.<method>(payload)`` on every rank; starts the ranks if there are none."""
        if self._ranks is None or self._ranks.closed:
            self._ranks = LocalRanks(self.world_size, self.service, self.service_kwargs, device=self.device)
        return self._ranks.call(method, payload, timeout=self.timeout)

    def run(self, request: Request) -> list[dict[str, Any]]:
        """What each rank finds.

        Raises:
            RanksFailed: a rank raised or died, or the ranks waited for each other.
        """
        with tempfile.TemporaryDirectory(prefix="nvdd-validate-") as scratch:
            try:
                return self.call("run", replace(request, scratch=scratch))
            except Exception as error:
                raise RanksFailed(error, load_records(scratch, self.world_size)) from error

    def close(self) -> None:
        """Ends the ranks."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def __enter__(self) -> ValidationSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
