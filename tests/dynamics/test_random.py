"""Counter-based random numbers: known words, moments, and independence of how atoms are divided."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from nvdd import InputError
from nvdd.dynamics.random import normal, philox, uniform


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known answers of the Random123 distribution (kat_vectors, philox4x32 10)
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_words_are_those_of_philox(counter, key, words):
    found = philox(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(w) for w in found) == words


def test_an_atom_gets_its_numbers_wherever_it_is():
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    whole = normal(ids, step=7, seed=2**40 + 3)
    for part in ids.split([1, 0, 399, 600]):
        torch.testing.assert_close(normal(part, 7, 2**40 + 3), whole[torch.isin(ids, part)], rtol=0, atol=0)


def test_numbers_differ_by_seed_step_stream_id_and_column():
    ids = torch.cat([torch.arange(5), torch.arange(5) + 2**33])
    many = [
        normal(ids, step, seed, stream) for step in (0, 1, 2**32) for seed in (0, 1, 2**32) for stream in (0, 1, 300)
    ]
    values = torch.stack(many).reshape(-1)
    assert len(values.unique()) == len(values)


def test_distribution():
    numbers = normal(torch.arange(40_000), step=3, seed=11, columns=5).numpy()
    for column in numbers.T:
        assert stats.kstest(column, "norm").pvalue > 1e-3
    correlation = np.corrcoef(numbers.T) - np.eye(5)
    assert np.abs(correlation).max() < 5 / np.sqrt(len(numbers))
    flat = uniform(torch.arange(40_000), 3, 11, columns=1).numpy()[:, 0]
    assert stats.kstest(flat, "uniform").pvalue > 1e-3


def test_seed_out_of_range():
    with pytest.raises(InputError, match="a seed must be a whole number from 0"):
        normal(torch.arange(2), 0, -1)
