"""`DistributedPipelineModel`: `DistributedModel` of a sum of models, under a name of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvdd.config import DomainConfig
from nvdd.errors import InputError
from nvdd.runtime.model import DistributedModel


class DistributedPipelineModel(DistributedModel):
    """Evaluates a `PipelineModelWrapper` on the ranks of ``config.mesh``; ``DistributedModel(pipeline)`` is the same.

    Args:
        pipeline: the sum of models.
        config: how the run is divided.
        report_phase: called with the name of each phase as it begins.

    Raises:
        InputError: ``pipeline`` is not made of blocks.
    """

    def __init__(
        self, pipeline: Any, config: DomainConfig | None = None, report_phase: Callable[[str], None] | None = None
    ) -> None:
        if not hasattr(pipeline, "composed_of"):
            raise InputError(
                f"DistributedPipelineModel takes a PipelineModelWrapper, not a {type(pipeline).__name__}; a model by itself "
                "goes into DistributedModel"
            )
        super().__init__(pipeline, config, report_phase=report_phase)
