"""Names for who writes handlers' declarations: policies, transforms, ShardTensor. Each is defined elsewhere."""

from nvdd.adapters import (
    AllReduceSum,
    AsIs,
    GatherInputs,
    GatherInputsFull,
    OpAdapter,
    ScatterOutputs,
    SliceOutputsOwned,
    SliceOwned,
)
from nvdd.policy import (
    GraphParallelPolicy,
    HaloStoragePolicy,
    LocalStoragePolicy,
    ShardedStoragePolicy,
    StoragePolicy,
)
from nvdd.roles import Role
from nvdd.shard_tensor import ShardTensor, to_local

__all__ = [
    "AllReduceSum",
    "AsIs",
    "GatherInputs",
    "GatherInputsFull",
    "GraphParallelPolicy",
    "HaloStoragePolicy",
    "LocalStoragePolicy",
    "OpAdapter",
    "Role",
    "ScatterOutputs",
    "ShardTensor",
    "ShardedStoragePolicy",
    "SliceOutputsOwned",
    "SliceOwned",
    "StoragePolicy",
    "to_local",
]
