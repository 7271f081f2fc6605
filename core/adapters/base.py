"""What all adapters have in common: a target, a status, installing and restoring."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

from nvdd.context import DDContext

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True)
class AdapterStatus:
    """What has become of one adapter.

    Attributes:
        kind: ``"op"``, ``"method"``, ``"function"``, ``"python"`` or ``"jit"``.
        target: what is adapted: ``"mymodel::fused"``, ``"aimnet.nbops.mol_sum"``.
        state: ``"pending"`` (not installed yet), ``"installed"``, ``"restored"`` or ``"failed"``.
        install_site: ``file:line`` where the adapter was made.
        error: the message, if it failed.
        calls: how often the adapter was used. Zero after a forward means that the model does not reach its target.
    """

    kind: str
    target: str
    state: str
    install_site: str = ""
    error: str | None = None
    calls: int = 0


class Installed:
    """An adapter that is in place. ``restore()`` puts back what was there; as a context manager, at the block's end.

    Attributes:
        calls: how often it was used.
    """

    calls: int = 0

    def restore(self) -> None:
        """Puts back what was there; a second time it does nothing."""

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: Any) -> None:
        self.restore()


class Adapter:
    """Base of the adapters. They are values: equal if they do the same to the same target.

    Attributes:
        install_site: ``file:line`` where the adapter was made; found out unless given.
    """

    kind: ClassVar[str] = ""
    install_site: str = ""

    @property
    def target(self) -> str:
        """What is adapted, in words."""
        raise TypeError(f"{type(self).__name__} is the base of the adapters")

    @property
    def is_declaration(self) -> bool:
        """Whether a replacement is still to come, from the wrapper's ``distributed_setup``."""
        return False

    def install(self, scope: DDContext | None = None) -> Installed:
        """Puts the adapter in place until ``restore()`` of what is returned.

        Args:
            scope: the forward in which it applies; None: everywhere in this process.
        """
        raise TypeError(f"{type(self).__name__} is the base of the adapters")

    def to_dict(self) -> dict[str, Any]:
        """The adapter as JSON values."""
        raise TypeError(f"{type(self).__name__} is the base of the adapters")

    def describe(self, state: str = "pending", error: str | None = None) -> AdapterStatus:
        """The adapter's status."""
        return AdapterStatus(self.kind, self.target, state, self.install_site, error)

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.target})"


def caller() -> str:
    """``file:line`` of the innermost frame outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith((_HERE, "<")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
