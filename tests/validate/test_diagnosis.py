"""Errors in the words of nvdd and torch, and what the validator makes of them."""

from __future__ import annotations

import pytest

from nvdd.errors import DistributedOpError, RankError
from nvdd.validate.diagnosis import translate


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("element 0 of tensors does not require grad and does not have a grad_fn", "severed-graph"),
        ("One of the differentiated Tensors appears to not have been used in the graph", "severed-graph"),
        ("ranks are out of step: rank 0 is in exchange 3", "out-of-step"),
        ("no answer to 'run' within 30 s (rank 0 is in phase 'forward')", "out-of-step"),
        ("rank 1: a tensor of shape (20, 6) was given where 14 owned rows of atoms are expected", "double-padding"),
        ("this Batch has no field 'charge'; it has []", "one-process-input"),
        ("something else", "error"),
    ],
)
def test_by_message(message, kind):
    found = translate(RuntimeError(message))
    assert found.kind == kind and found.text and found.remedy


def test_the_message_of_a_rank_is_read():
    error = RankError(1, "backward", "RuntimeError: ranks are out of step: ...", "a traceback")
    assert translate(error).kind == "out-of-step"


def test_outputs_are_named():
    text = "output 'dipole' of shape (1, 3) is declared PER_GRAPH, but it is not known to be summed over ranks (its role was lost"
    found = translate(DistributedOpError(text))
    assert found.key == "not-known-summed:dipole" and "'dipole'" in found.text


def test_a_refusal_that_no_rule_knows_keeps_its_words():
    found = translate(DistributedOpError("frob(OWNED(3,)) at model.py:3 in f: it frobs. Do not."))
    assert found.kind == "refused-op" and "it frobs" in found.text


def test_paths_named_script_are_no_scripts():
    assert translate(RuntimeError("cannot open /tmp/my_script.py")).kind == "error"
