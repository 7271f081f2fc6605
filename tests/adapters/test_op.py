"""`OpAdapter` around a Triton kernel, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase.build import bulk

from nvdd import Batch, DistributedModel
from nvdd.validate import trace_and_validate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's kernels need a GPU")


def quartz_like():
    atoms = bulk("NaCl", "rocksalt", a=5.0, cubic=True).repeat((2, 1, 2))
    atoms.rattle(0.1, seed=4)
    return atoms


def test_kernel_equals_plain_torch():
    from triton_ops import model

    batch = Batch.from_atoms(quartz_like())
    mine, plain = (DistributedModel(m)(batch) for m in (model().cuda(), model(plain=True)))
    largest = plain["forces"].abs().max()
    assert largest > 1e-3
    np.testing.assert_allclose(mine["energy"].cpu(), plain["energy"], rtol=1e-12)
    np.testing.assert_allclose(mine["forces"].cpu(), plain["forces"], rtol=0, atol=1e-11 * largest)


@pytest.mark.parametrize("ranks", (2, 3))
def test_over_ranks(ranks):
    from triton_ops import model

    report = trace_and_validate(model, quartz_like(), world_size=ranks, device="cuda:0")
    assert report.ok, report.next_action


def test_undeclared_kernel_is_refused():
    from triton_ops import undeclared

    report = trace_and_validate(undeclared, quartz_like(), world_size=2, device="cuda:0", md_steps=0)
    assert not report.ok
    assert "triton_sum" in report.next_action
