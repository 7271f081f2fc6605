"""What a model may and may not say of its neighbours."""

import pytest

from nvdd import NeighborConfig


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cutoff": 0.0}, "cutoff must be positive, got 0.0"),
        ({"cutoff": 5.0, "bond_cutoff": 3.0}, "goes with bonds=True"),
        ({"cutoff": 5.0, "bonds": True, "bond_cutoff": 6.0}, "between 0 and the cutoff"),
        ({"cutoff": 5.0, "bonds": True, "drops_far_edges": True}, "drops_far_edges=True does not go with bonds=True"),
    ],
)
def test_neighbours_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        NeighborConfig(**options)
