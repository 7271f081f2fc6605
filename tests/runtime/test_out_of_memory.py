"""Advice where memory runs out: what counts as that, what the message says, and that it is true."""

from __future__ import annotations

import re

import pytest
import torch
from ase.build import bulk

from faulty import Faulty
from nvdd import Batch, Communicator, DistributedModel, DomainConfig, RankError
from nvdd.runtime import out_of_memory
from nvdd.runtime.out_of_memory import advice, advised, is_out_of_memory, ranks_needed
from nvdd_ase import NVDDCalculator

ONE = Communicator(None)


def of_torch() -> BaseException:
    """What torch raises on this machine for more than any has."""
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    return error.value


def test_recognised():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(of_torch())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not is_out_of_memory(RuntimeError("sizes of tensors must match"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize("make", (MemoryError, lambda: torch.OutOfMemoryError("CUDA out of memory."), of_torch))
def test_type_stays_and_advice_is_given_once(make):
    error = make()
    first = str(error)
    with pytest.raises(type(error)) as raised, advised(ONE, lambda: None), advised(ONE, lambda: (5, 6, 7)):
        raise error
    message = str(raised.value)
    assert message.startswith(first) and message.count("ran out of memory") == 1 and "\n" not in message.removeprefix(first)
    assert "rank 0 of 1 with 5 owned atoms, 6 halo rows, 7 edges ran out of memory" in message


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match=r"^no$"), advised(ONE, lambda: (5, 6, 7)):
        raise RuntimeError("no")


def test_the_least_number_of_ranks(monkeypatch):
    monkeypatch.setattr(out_of_memory, "in_use", lambda comm: (60 * 2**30, 80 * 2**30))
    text = advice(ONE, (5, 6, 7), "CUDA out of memory. Tried to allocate 120.00 GiB. GPU 0 has ...")
    assert "(60 GiB of 80 GiB in use)" in text
    assert "3 at the least" in text  # 180 GiB in pieces of 72
    assert ranks_needed(10, 100, 4) == 5  # never fewer than there were, and one more


def test_options_that_save_memory_are_named_where_there_are_some(monkeypatch):
    monkeypatch.setattr(out_of_memory, "_SAVERS", ("skin", "no_such_option"))
    assert out_of_memory.savers() == ", or skin="
    assert advice(ONE, None).endswith("float32, or skin=")


def argon():
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat(2)
    atoms.rattle(0.1, seed=1)
    return atoms


def test_in_one_process():
    model = DistributedModel(Faulty("memory", "backward", 0, 1), DomainConfig())
    batch = Batch.from_atoms(argon())
    with pytest.raises(torch.OutOfMemoryError, match=r"rank 0 of 1 with 32 owned atoms, 0 halo rows, [1-9][0-9]* edges"):
        model(batch)


def test_over_ranks_names_the_rank_and_what_it_had():
    atoms = argon()
    options = {"fault": "memory", "phase": "forward", "rank": 1, "call": 2}
    with NVDDCalculator("py:faulty:Faulty", model_options=options, ranks=2, device="cpu") as atoms.calc:
        atoms.get_forces()
        report = atoms.calc.report()[1]
        atoms.rattle(1e-9, seed=2)  # the same edges
        with pytest.raises(RankError) as error:
            atoms.get_forces()
    had = f"rank 1 of 2 with {report['owned']} owned atoms, {report['halo']} halo rows, {report['edges']} edges ran out of memory"
    assert had in str(error.value)
    # 20 GiB were asked for
    least = int(re.search(r"(\d+) at the least", str(error.value))[1])
    assert least >= max(3, 2 * 20 * 2**30 / out_of_memory.host_memory())
