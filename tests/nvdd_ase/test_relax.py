"""What a relaxation lets through of the libraries' warnings; the relaxation itself is tested as the command, in test_cli.py."""

from __future__ import annotations

import warnings

from nvdd_ase.relax import _quietly

SCIPY = "logm result may be inaccurate, approximate err = {}"


def test_scipys_warning_is_heard_only_where_it_means_something():
    def steps():
        for error in ("7.3e-13", "1.2e-05"):
            warnings.warn(SCIPY.format(error), RuntimeWarning, stacklevel=2)
            yield error == "1.2e-05"

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert list(_quietly(steps())) == [False, True]
    assert [str(w.message) for w in heard] == [SCIPY.format("1.2e-05")]
