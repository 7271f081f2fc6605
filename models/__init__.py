"""Model families: each a wrapper beside its spec. `nvdd.models.load` builds one from its name."""

from nvdd.models.base import BaseModelMixin, ModelOutputs
from nvdd.models.pipeline import PipelineModelWrapper
from nvdd.models.registry import ModelFamily, families, load

__all__ = ["BaseModelMixin", "ModelFamily", "ModelOutputs", "PipelineModelWrapper", "families", "load"]
