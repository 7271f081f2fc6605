"""Does a model over ranks give what it gives in one process? `trace_and_validate` says, and why not."""

from nvdd.validate.diagnosis import Diagnosis
from nvdd.validate.factory import FactoryRef
from nvdd.validate.fixes import Fix
from nvdd.validate.report import Attempt, TraceReport
from nvdd.validate.session import ValidationSession
from nvdd.validate.tolerance import Comparison, Tolerance
from nvdd.validate.validator import trace_and_validate

__all__ = [
    "Attempt",
    "Comparison",
    "Diagnosis",
    "FactoryRef",
    "Fix",
    "Tolerance",
    "TraceReport",
    "ValidationSession",
    "trace_and_validate",
]
