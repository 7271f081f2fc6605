"""`nvdd.specs` under another name."""

from nvdd.specs import *  # noqa: F403
from nvdd.specs import __all__  # noqa: F401
