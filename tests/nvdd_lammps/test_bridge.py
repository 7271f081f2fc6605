"""The plugin's Python side by itself: files, models that come and go, errors."""

from __future__ import annotations

import ctypes as ct
import pickle

import pytest

from lammps_runs import LennardJones
from lammps_step import Memory
from nvdd.errors import MissingDependencyError, NvddError
from nvdd_lammps import bridge, plugin_data


def serve(kind, struct, text=""):
    """How a request ended, and its message."""
    buffer = ct.create_string_buffer(200)
    code = bridge._serve(kind, ct.addressof(struct), text.encode(), ct.addressof(buffer), 200)
    return code, buffer.value.decode()


def loaded(path, unified):
    path.write_bytes(pickle.dumps(unified))
    model = plugin_data.ModelStruct()
    assert serve(bridge._LOAD, model, str(path))[0] == bridge._DONE
    return model


def test_a_model_comes_and_goes(tmp_path):
    model = loaded(tmp_path / "any.suffix", LennardJones(["Ar", "Kr"], cutoff=4.0))
    assert (model.nelements, model.cutoff, model.elements) == (2, 4.0, b"Ar Kr")
    other = loaded(tmp_path / "other", LennardJones())
    assert other.handle != model.handle
    assert serve(bridge._TYPES, model, "Kr NULL Ar")[0] == bridge._DONE
    assert bridge._loaded[model.handle].element_of_type == ["Kr", None, "Ar"]
    for each in (model, other):
        handle = each.handle
        assert serve(bridge._RELEASE, each)[0] == bridge._DONE
        assert handle not in bridge._loaded and each.handle == 0


def test_torch_files(tmp_path):
    import torch

    torch.save(LennardJones(cutoff=3.0), tmp_path / "model.pt")
    model = plugin_data.ModelStruct()
    assert serve(bridge._LOAD, model, str(tmp_path / "model.pt"))[0] == bridge._DONE
    assert model.cutoff == 3.0
    serve(bridge._RELEASE, model)


class Raising(LennardJones):
    """Raises what it is told to."""

    error: BaseException = ValueError("unwell")

    def compute_forces(self, data):
        raise self.error


@pytest.mark.parametrize(
    ("error", "message", "everywhere", "traceback"),
    [
        (ValueError("unwell\nmore"), "ValueError: unwell\nmore", False, True),
        (KeyboardInterrupt(), "KeyboardInterrupt", False, True),
        (SystemExit(3), "SystemExit: 3", False, True),
        (NvddError("known"), "known", False, True),
        (MissingDependencyError("pip install it"), "pip install it", False, True),
        ("agreed", "all of us", True, False),
        (ValueError("é" * 300), "ValueError: " + "é" * 93, False, True),
    ],
)
def test_errors(tmp_path, capsys, error, message, everywhere, traceback):
    """Nothing gets out of the callback; the message is cut to what there is room for."""
    from nvdd_lammps.ranks import AgreedError

    model = loaded(tmp_path / "model", LennardJones())
    raising = Raising()
    raising.error = AgreedError("all of us") if error == "agreed" else error
    bridge._loaded[model.handle].unified = raising
    code, text = serve(bridge._COMPUTE, Memory(handle=model.handle).step)
    assert code == (bridge._FAILED_EVERYWHERE if everywhere else bridge._FAILED_HERE)
    assert text == message
    assert ("Traceback" in capsys.readouterr().err) == traceback
    serve(bridge._RELEASE, model)


class NoCutoff(LennardJones):
    """Has no sensible cutoff."""

    def __setstate__(self, state):
        self.__dict__.update(state, rcutfac=float("nan"))


class NoElements(LennardJones):
    """Has atomic numbers where symbols are expected."""

    def __setstate__(self, state):
        self.__dict__.update(state, element_types=[18])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list, which is no ML-IAP unified model: it has no element_types"),
        (NoCutoff(), "has rcutfac = nan; half of its cutoff is expected"),
        (NoElements(), r"has element_types = [18]; symbols are expected"),
        (None, "there is no model file"),
    ],
)
def test_files_that_are_no_models(tmp_path, capsys, content, message):
    path = tmp_path / "model"
    if content is not None:
        path.write_bytes(pickle.dumps(content))
    before = dict(bridge._loaded)
    code, text = serve(bridge._LOAD, plugin_data.ModelStruct(), str(path))
    assert code == bridge._FAILED_HERE and message in text.replace(str(tmp_path), "")
    assert "Traceback" not in capsys.readouterr().err  # the user's mistake, said in one line
    assert bridge._loaded == before


def test_a_plugin_of_another_nvdd_is_refused():
    with pytest.raises(NvddError, match="compiled by another version of nvdd"):
        bridge.connect(0, 1, 2)
