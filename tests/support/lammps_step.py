"""A step of the LAMMPS plugin, made of arrays of a test."""

from __future__ import annotations

import ctypes as ct

import numpy as np

from nvdd_lammps import plugin_data

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
        self.step = step = plugin_data.StepStruct(
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
            setattr(step, name, plugin_data.PairArray(self._note(name, shape)))
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
        return plugin_data.StepData(self.step, ["Si", None])
