"""The plugin's Python side by itself: arrays over foreign memory, errors, files."""

from __future__ import annotations

import ctypes as ct
import pickle

import numpy as np
import pytest

from lammps_runs import LennardJones
from nvdd.errors import InputError, MissingDependencyError, NvddError
from nvdd_lammps import bridge

PAIRS = [(0, 1), (0, 2), (1, 0)]


class Memory:
    """A step of 2 owned atoms and a ghost, as the plugin would describe it."""

    def __init__(self, **changes):
        self.x = np.array([[0.0, 0, 0], [1, 0, 0], [0, 2, 0]])
        self.f = np.zeros((3, 3))
        self.tag = np.array([7, 3, 7], np.int32)
        self.type = np.array([1, 2, 1], np.int32)
        self.elems = np.array([0, -1, 0], np.int32)
        self.iatoms = np.array([1, 0], np.int32)
        self.ielems = np.array([-1, 0], np.int32)
        self.pair_i, self.pair_j = np.array(PAIRS, np.int32).T.copy()
        self.rij = self.x[self.pair_j] - self.x[self.pair_i]
        self.listneighbors = np.array([0, 1, 2], np.int32)
        self.eatoms = np.zeros(2)
        self.calls = {}
        self.step = step = bridge._Step(
            tag_bytes=4, nlocal=2, ntotal=3, nlistatoms=2, npairs=3, nlistneighbors=3, ago=4, list_generation=9,
            units=b"metal", newton_pair=1, me=1, nprocs=2, npartitions=1, world=1140850688, periodic=(1, 0, 1),
            box=(0, 1, 2, 10, 11, 12, 0.5, -0.25, 0.125), triclinic=1,
        )  # fmt: skip
        for name in [
            "x",
            "f",
            "tag",
            "type",
            "elems",
            "iatoms",
            "ielems",
            "pair_i",
            "pair_j",
            "rij",
            "listneighbors",
            "eatoms",
        ]:
            setattr(step, name, getattr(self, name).ctypes.data)
        for name, shape in (("pair_forces", (3, 3)), ("add_forces", (2, 3)), ("add_virial", (6,))):
            setattr(step, name, bridge._PairArray(self._note(name, shape)))
        for name, value in changes.items():
            setattr(step, name, value)

    def _note(self, name, shape):
        def called(_, address):
            count = int(np.prod(shape))
            values = np.ctypeslib.as_array(ct.cast(address, ct.POINTER(ct.c_double)), (count,))
            self.calls[name] = values.reshape(shape).copy()
            return 0

        return called

    def data(self):
        return bridge.StepData(self.step, ["Si", None])


def test_arrays_are_views_of_what_lammps_has():
    memory = Memory()
    data = memory.data()
    for name in ["x", "types"]:
        assert np.shares_memory(getattr(data.host, name), getattr(memory, name.rstrip("s")))
    for name in ["f", "elems", "iatoms", "ielems", "pair_i", "pair_j", "rij"]:
        assert np.shares_memory(getattr(data, name), getattr(memory, name))
        assert np.array_equal(getattr(data, name), getattr(memory, name))
    assert np.array_equal(data.numneighs, [1, 2])
    assert np.array_equal(data.jelems, [-1, 0, 0])
    assert data.host.tags.dtype == np.int64 and data.host.tags.tolist() == [7, 3, 7]
    assert (data.nlocal, data.ntotal, data.nlistatoms, data.natomneigh, data.npairs) == (2, 3, 2, 2, 3)


def test_host():
    host = Memory().data().host
    assert (host.kind, host.units, host.me, host.nprocs, host.neigh_age, host.list_generation) == (
        "plugin",
        "metal",
        1,
        2,
        4,
        9,
    )
    lo, hi, xy, xz, yz, periodicity, triclinic = host.box()
    assert (lo.tolist(), hi.tolist()) == ([0, 1, 2], [10, 11, 12])
    assert (xy, xz, yz, periodicity, triclinic) == (0.5, -0.25, 0.125, (True, False, True), True)
    assert host.q is None and host.list_neighbors().tolist() == [0, 1, 2]
    assert Memory(tag=None).data().host.tags is None


def test_nothing_at_all():
    """A rank without atoms: arrays of no rows, and calls that do nothing."""
    data = Memory(nlocal=0, ntotal=0, nlistatoms=0, npairs=0, nlistneighbors=0, x=None, rij=None, pair_i=None).data()
    assert data.rij.shape == data.f.shape == (0, 3) and data.pair_i.shape == data.elems.shape == (0,)
    data.update_pair_forces(np.zeros((0, 3)))
    data.eatoms = np.zeros(0)
    data.energy = 0.0


def test_what_is_handed_back():
    memory = Memory()
    data = memory.data()
    data.energy = np.float32(1.5)
    data.eatoms = [1.0, 2.0]
    assert memory.step.energy == 1.5 and memory.step.eatoms_set and memory.eatoms.tolist() == [1, 2]
    forces = np.arange(9, dtype=np.float32).reshape(3, 3)
    data.update_pair_forces(np.asfortranarray(forces))
    assert np.array_equal(memory.calls["pair_forces"], forces)
    data.host.add_forces(np.ones((2, 3)))
    data.host.set_virial(np.arange(6))
    assert np.array_equal(memory.calls["add_virial"], np.arange(6)) and memory.calls["add_forces"].sum() == 6
    data.update_pair_energy([2.0, 4.0, 8.0])  # of atom 0 and atom 1, which the list has the other way round
    assert memory.eatoms.tolist() == [4, 3] and memory.step.energy == 7


def test_what_does_not_fit():
    data = Memory(want_vatom=1).data()
    for hand_back in (
        lambda: data.update_pair_forces(np.zeros((4, 3))),
        lambda: data.host.add_forces(np.zeros((3, 3))),
        lambda: data.update_pair_energy(np.zeros(2)),
        lambda: setattr(data, "eatoms", np.zeros(3)),
    ):
        with pytest.raises(InputError, match=r"of shape .* were handed to LAMMPS, where .* is expected"):
            hand_back()
    with pytest.raises(InputError, match="no virial per atom: take out the compute"):
        data.host.set_virial(np.zeros(6))
    for name in ("energy", "eatoms"):
        with pytest.raises(AttributeError):
            getattr(data, name)


# ---- requests ----------------------------------------------------------------------------------------------------


def serve(kind, struct, text=""):
    """How a request ended, and its message."""
    buffer = ct.create_string_buffer(200)
    code = bridge._serve(kind, ct.addressof(struct), text.encode(), ct.addressof(buffer), 200)
    return code, buffer.value.decode()


def loaded(path, unified):
    path.write_bytes(pickle.dumps(unified))
    model = bridge._Model()
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
    model = bridge._Model()
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
    code, text = serve(bridge._LOAD, bridge._Model(), str(path))
    assert code == bridge._FAILED_HERE and message in text.replace(str(tmp_path), "")
    assert "Traceback" not in capsys.readouterr().err  # the user's mistake, said in one line
    assert bridge._loaded == before


def test_a_plugin_of_another_nvdd_is_refused():
    with pytest.raises(NvddError, match="compiled by another version of nvdd"):
        bridge.connect(0, 1, 2)
