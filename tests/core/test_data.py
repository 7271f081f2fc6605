"""AtomicData and Batch: to and from ase.Atoms without loss; edges in every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.calculator import compare_atoms
from ase.constraints import FixAtoms

from nvdd import AtomicData, Batch, EdgeLayout
from nvdd.neighbors import attach_neighbors


def crystal() -> Atoms:
    atoms = Atoms(
        "SiO2", [(0.1, 0, 0), (1.6, 0.2, 0), (9.1, 0, 3.0)], cell=[[4, 0.1, 0], [0, 5, 0], [1, 0, 6]], pbc=(1, 1, 0)
    )
    atoms.set_momenta(np.arange(9.0).reshape(3, 3))
    atoms.set_initial_charges([0.5, -0.25, -0.25])
    atoms.set_tags([1, 2, 3])
    atoms.set_array("label", np.array(["a", "b", "c"]))
    atoms.info = {"charge": 1, "spin": 0.5, "flag": True, "name": "quartz", "field": np.ones(3), "nested": {"a": [1]}}
    atoms.set_constraint(FixAtoms([1]))
    atoms.set_celldisp([0.1, 0.2, 0.3])
    return atoms


def test_atoms_round_trip():
    atoms = crystal()
    back = AtomicData.from_atoms(atoms).to_atoms()
    assert not compare_atoms(atoms, back)
    assert set(atoms.arrays) == set(back.arrays)
    for name, array in atoms.arrays.items():
        np.testing.assert_array_equal(array, back.arrays[name])
        assert array.dtype == back.arrays[name].dtype
    assert list(atoms.info) == list(back.info)
    for name, value in atoms.info.items():
        assert type(back.info[name]) is type(value)
        np.testing.assert_array_equal(back.info[name], value)
    assert repr(atoms.constraints) == repr(back.constraints)
    np.testing.assert_array_equal(atoms.get_celldisp(), back.get_celldisp())
    back.positions += 1
    assert atoms.positions[0, 0] == 0.1, "the copy is a copy"


def test_batch_round_trip():
    first, second = crystal(), crystal()[:2]
    second.info["charge"] = 3
    batch = Batch.from_atoms([first, second])
    assert batch.n_systems == 2 and batch.n_atoms == 5
    assert batch.ptr.tolist() == [0, 3, 5]
    assert batch.n_atoms_per_system.tolist() == [3, 2]
    assert batch.charge.tolist() == [1, 3]
    for atoms, back in zip((first, second), batch.to_atoms(), strict=True):
        np.testing.assert_array_equal(atoms.positions, back.positions)
        np.testing.assert_array_equal(atoms.get_initial_charges(), back.get_initial_charges())


def test_missing_field_names_what_is_there():
    with pytest.raises(AttributeError, match=r"no field 'magmom'.*initial_charges"):
        Batch.from_atoms(crystal()).magmom  # noqa: B018


def test_fields_can_be_set():
    """Under their own names, and under those of models; also where a system field has the same name."""
    batch = Batch.from_atoms(crystal())
    batch.initial_charges = torch.ones(3)
    assert batch.node_fields["initial_charges"].tolist() == [1.0] * 3 and batch.charges.tolist() == [1.0] * 3
    batch.charges = torch.zeros(3)
    assert batch.node_fields["charges"].tolist() == [0.0] * 3 and batch.charges.tolist() == [0.0] * 3
    batch.charge = torch.tensor([2.0])
    assert batch.system_fields["charge"].item() == 2.0
    atoms = crystal()
    atoms.info["charges"] = 5.0
    assert Batch.from_atoms(atoms).charges.tolist() == [0.5, -0.25, -0.25]


@pytest.mark.parametrize("sender_column", (0, 1))
@pytest.mark.parametrize("vector", ("sender_minus_receiver", "receiver_minus_sender"))
def test_edge_layouts(sender_column, vector):
    layout = EdgeLayout(sender_column, vector)
    batch = attach_neighbors(Batch.from_atoms([crystal(), crystal()[:2]]), 3.0, layout)
    assert batch.edge_index.shape == (2, batch.neighbor_list.shape[0])
    s, r = batch.senders, batch.receivers
    shift = torch.einsum("ei,eij->ej", batch.neighbor_list_shifts, batch.cell[batch.batch[r]])
    expected = layout.sign * (batch.positions[s] - batch.positions[r]) + shift
    torch.testing.assert_close(batch.edge_vectors, expected, rtol=0, atol=0)
    assert (batch.edge_vectors.norm(dim=1) < 3.0 + 1e-12).all() and len(s) > 0
    assert (batch.batch[s] == batch.batch[r]).all()
    # the reverse of an edge has the opposite vector
    torch.testing.assert_close(batch.edge_vectors[batch.reverse_edges], -batch.edge_vectors, rtol=0, atol=1e-14)
    assert len(batch.edge_of_bond) * 2 == len(s)
    assert torch.equal(batch.bond_of_edge[batch.edge_of_bond], torch.arange(len(batch.edge_of_bond)))
    assert torch.equal(batch.bond_of_edge[batch.reverse_edges], batch.bond_of_edge)
    assert batch.bonded_edges is None
    attach_neighbors(batch, 3.0, layout, bond_cutoff=2.0)
    short = batch.edge_vectors[batch.bonded_edges]
    assert torch.equal(batch.bonded_edges, (batch.edge_vectors.norm(dim=1) < 2.0).nonzero().squeeze(1))
    assert 0 < len(batch.reverse_edges) == len(short) < len(s)
    torch.testing.assert_close(short[batch.reverse_edges], -short, rtol=0, atol=1e-14)
