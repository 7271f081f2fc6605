"""Adapters: what stands between a distributed model and code that nvdd cannot see into.

Pick by how the code is called: a registered custom operation (`OpAdapter`), a method of a class (`MethodAdapter`), a
function of a module (`FunctionAdapter`), any attribute of a module (`PythonAdapter`), a scripted function
(`JitAdapter`). `EdgeStage` and `AtomStage` declare arguments of a method. A spec carries them; `AdapterRegistry` has them in place while the model runs.
"""

from nvdd.adapters.atoms import AtomStage
from nvdd.adapters.base import Adapter, AdapterStatus, Installed
from nvdd.adapters.callables import FunctionAdapter, JitAdapter, MethodAdapter, PythonAdapter
from nvdd.adapters.edges import EdgeStage
from nvdd.adapters.load import adapter_from_dict
from nvdd.adapters.op import OpAdapter
from nvdd.adapters.registry import AdapterRegistry
from nvdd.adapters.transforms import (
    AllReduceSum,
    AsIs,
    GatherInputs,
    GatherInputsFull,
    ScatterOutputs,
    SliceOutputsOwned,
    SliceOwned,
)

__all__ = [
    "Adapter",
    "AdapterRegistry",
    "AdapterStatus",
    "AllReduceSum",
    "AsIs",
    "AtomStage",
    "EdgeStage",
    "FunctionAdapter",
    "GatherInputs",
    "GatherInputsFull",
    "Installed",
    "JitAdapter",
    "MethodAdapter",
    "OpAdapter",
    "PythonAdapter",
    "ScatterOutputs",
    "SliceOutputsOwned",
    "SliceOwned",
    "adapter_from_dict",
]
