"""Storage policies: which knobs go together."""

from __future__ import annotations

import itertools

import pytest

from nvdd import (
    SPEC_MPNN_GP,
    BaseModelMixin,
    DistributedModel,
    GraphParallelPolicy,
    HaloStoragePolicy,
    InputError,
    LocalStoragePolicy,
    ModelConfig,
    NeighborConfig,
    ShardedStoragePolicy,
    StoragePolicy,
)
from nvdd.policy import GATHER_MODES, POLICIES, SCATTER_MODES


def test_defaults():
    assert HaloStoragePolicy() == HaloStoragePolicy("halo_correction", "halo_read", True)
    assert ShardedStoragePolicy() == ShardedStoragePolicy("distributed", "distributed", True)
    assert LocalStoragePolicy() == LocalStoragePolicy("local", "local", True)
    assert GraphParallelPolicy() == GraphParallelPolicy("local", "distributed", True)


@pytest.mark.parametrize("policy", POLICIES.values())
def test_knobs_are_checked(policy):
    for gather, scatter in itertools.product(GATHER_MODES, SCATTER_MODES):
        if (gather, scatter) in policy.meanings:
            made = policy(scatter_mode=scatter, gather_mode=gather, system_reductions=False)
            assert (made.gather_mode, made.scatter_mode, made.system_reductions) == (gather, scatter, False)
        else:
            with pytest.raises(ValueError, match=f"{policy.__name__}: gather_mode='{gather}'.*has no meaning; use"):
                policy(scatter_mode=scatter, gather_mode=gather)
    with pytest.raises(ValueError, match="scatter_mode='everywhere' is not one of"):
        policy(scatter_mode="everywhere")
    with pytest.raises(ValueError, match="system_reductions must be True or False, got 1"):
        policy(system_reductions=1)


def test_the_base_is_no_policy():
    with pytest.raises(TypeError, match="use one of GraphParallelPolicy, HaloStoragePolicy"):
        StoragePolicy()


def test_graph_parallel_is_no_division_of_space():
    class Wrapper(BaseModelMixin):
        model_config = ModelConfig(neighbor_config=NeighborConfig(3.0))

    with pytest.raises(InputError, match=r"divides atoms in space.*GraphParallelPolicy"):
        DistributedModel(Wrapper(), spec=SPEC_MPNN_GP)
