"""Operations on ShardTensors over ranks against the same operations on plain tensors in one process.

A test module has ``CASES``: kind of result -> name -> function of a `World` (a name that ends with ", once" has no
second derivative in torch); and ``REFUSED``: name -> (function,
operation that the error names). `table` runs all of a module's cases on all partitions, once; `check` and
`check_refused` judge one of them: values, roles, first and second derivatives by every leaf.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvdd.communicator import Communicator
from nvdd.errors import DistributedOpError
from nvdd.exchange import fetch
from nvdd.handlers.count import make_count
from nvdd.plan import ExchangePlan
from nvdd.policy import HaloStoragePolicy
from nvdd.roles import Role, ShardMeta
from nvdd.shard_tensor import ShardTensor, promote, to_local
from rank_pool import _module_from

SYSTEM_OF = np.repeat([0, 1, 2], [6, 3, 4])
N, N_SYSTEMS, N_EDGES = len(SYSTEM_OF), 3, 41
# owner of each atom by number of ranks: all systems on one rank; mixed; each rank lacks systems; a rank without atoms
OWNERS = {
    1: np.zeros(N, np.int64),
    2: np.array([0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 0, 1, 1]),
    3: np.array([1, 1, 0, 1, 0, 1, 0, 0, 0, 2, 2, 2, 2]),
    4: np.array([1, 1, 0, 3, 0, 1, 0, 3, 0, 1, 1, 3, 0]),  # rank 2 has none
}
POLICIES = {
    "halo_fetch": HaloStoragePolicy(gather_mode="halo_fetch", scatter_mode="local"),
    "halo_read": HaloStoragePolicy(gather_mode="halo_read", scatter_mode="halo_correction"),
}
LEAVES = {"x": "atoms", "v": "atoms", "t": "atoms", "e": "edges", "f": "edges", "s": "systems", "sv": "systems",
          "w": "parameter", "table": "parameter"}  # fmt: skip


@cache
def whole() -> dict[str, Tensor]:
    """All rows of everything, the same in every process."""
    rng = np.random.default_rng(7)
    tensor = lambda *shape: torch.from_numpy(rng.normal(size=shape))
    few = lambda *shape: torch.from_numpy(rng.integers(-1, 3, shape).astype(float))  # many exact ties
    senders, receivers = [], []
    while len(senders) < N_EDGES:
        i, j = rng.integers(0, N, 2)
        # atoms 2 and 9 have no edges into them, 5 sends none; self images and repeated pairs occur
        if SYSTEM_OF[i] == SYSTEM_OF[j] and i not in (2, 9) and j != 5:
            senders.append(j)
            receivers.append(i)
    order = np.argsort(receivers, kind="stable")
    return {
        "x": tensor(N, 3),
        "v": tensor(N, 3, 2),
        "t": few(N, 3),
        "z": torch.from_numpy(rng.integers(0, 4, N)),
        "e": tensor(N_EDGES, 3),
        "f": few(N_EDGES, 3),
        "s": tensor(N_SYSTEMS),
        "sv": tensor(N_SYSTEMS, 3),
        "w": tensor(3, 4),
        "table": tensor(4, 3),
        "senders": torch.from_numpy(np.array(senders)[order]),
        "receivers": torch.from_numpy(np.array(receivers)[order]),
        "batch": torch.from_numpy(SYSTEM_OF),
    }


class World:
    """What a case computes with.

    Attributes:
        x (n, 3), v (n, 3, 2), t (n, 3; many equal values): per atom; z (n,): species 0 to 3.
        e (E, 3), f (E, 3; many equal values): per edge.
        senders, receivers (E,), edge_index (2, E), neighbor_list (E, 2).
        batch (n,), n_atoms_per_system (n_systems,), s (n_systems,), sv (n_systems, 3).
        w (3, 4), table (4, 3): parameters.
        n, n_edges, n_systems: rows here.
        leaves: what derivatives are taken by.
    """

    def __init__(self, tensors: dict[str, Tensor], leaves: dict[str, Tensor]) -> None:
        self.leaves = leaves
        self.__dict__.update(tensors)
        self.n, self.n_edges, self.n_systems = self.x.shape[0], self.e.shape[0], N_SYSTEMS

    def zeros(self, *shape: int, value: float = 0.0) -> Tensor:
        """A plain tensor, as models make them."""
        return torch.full(shape, value, dtype=torch.float64)


def plain_world() -> World:
    """One process, plain tensors."""
    data = dict(whole())
    leaves = {name: data[name].clone().requires_grad_() for name in LEAVES}
    leaves |= {name: torch.nn.Parameter(data[name].clone()) for name in LEAVES if LEAVES[name] == "parameter"}
    tensors = data | {name: leaf.clone() for name, leaf in leaves.items() if LEAVES[name] != "parameter"}
    tensors |= {name: leaves[name] for name in LEAVES if LEAVES[name] == "parameter"}
    tensors["edge_index"] = torch.stack([data["senders"], data["receivers"]])
    tensors["neighbor_list"] = torch.stack([data["receivers"], data["senders"]], 1)
    tensors["n_atoms_per_system"] = torch.bincount(data["batch"], minlength=N_SYSTEMS)
    return World(tensors, leaves)


class Part:
    """One rank's rows: ids of owned atoms, of halo atoms, of edges; the plan between ranks."""

    def __init__(self, comm: Communicator, policy: HaloStoragePolicy) -> None:
        data, owner = whole(), OWNERS[comm.size]
        self.ids = np.flatnonzero(owner == comm.rank)
        senders, receivers = data["senders"].numpy(), data["receivers"].numpy()
        self.edges = np.flatnonzero(owner[receivers] == comm.rank)
        halo = np.unique(senders[self.edges])
        halo = halo[owner[halo] != comm.rank]
        self.halo = halo[np.argsort(owner[halo], kind="stable")]
        n_phantom = int(len(self.ids) == 0)
        owned = self.ids if not n_phantom else np.zeros(1, np.int64)
        row_at_owner = np.array([np.flatnonzero(np.flatnonzero(owner == owner[i]) == i)[0] for i in range(N)])
        plan = ExchangePlan.build(
            comm, len(owned), torch.from_numpy(owner[self.halo]), torch.from_numpy(row_at_owner[self.halo])
        )
        self.meta = ShardMeta(plan, N_SYSTEMS, n_phantom, policy)
        self.rows = np.concatenate([owned, self.halo])
        self.owned = torch.from_numpy(owned)
        local = np.full(N, -1)
        local[self.rows] = np.arange(len(self.rows))
        if n_phantom:
            local[:] = -1
        self.senders = torch.from_numpy(local[senders[self.edges]])
        self.receivers = torch.from_numpy(local[receivers[self.edges]])

    def world(self) -> World:
        """ShardTensors of this rank, for one case."""
        meta, data = ShardMeta(self.meta.plan, N_SYSTEMS, self.meta.n_phantom, self.meta.policy), whole()
        edges, rows = torch.from_numpy(self.edges), torch.from_numpy(self.rows[: meta.n_rows])
        leaves, tensors = {}, {}
        for name, kind in LEAVES.items():
            take = {"atoms": self.owned, "edges": edges}.get(kind)
            leaf = leaves[name] = (data[name] if take is None else data[name][take]).clone().requires_grad_()
            if kind == "atoms":
                value = leaf.clone() if meta.fetches else fetch(leaf, meta.plan, name)
                tensors[name] = promote(value, meta.atom_role, meta)
            elif kind == "parameter":
                tensors[name] = leaves[name] = torch.nn.Parameter(data[name].clone())
            else:
                tensors[name] = promote(leaf.clone(), Role.EDGE if kind == "edges" else Role.SYSTEM, meta)
        system = data["batch"][rows]
        tensors |= {
            "z": promote(data["z"][rows], meta.atom_role, meta),
            "senders": promote(self.senders, Role.SENDER, meta),
            "receivers": promote(self.receivers, Role.RECEIVER, meta),
            "edge_index": promote(
                torch.stack([self.senders, self.receivers]), Role.EDGE_INDEX, meta, row_dim=1, sender_at=0
            ),
            "neighbor_list": promote(torch.stack([self.receivers, self.senders], 1), Role.EDGE_INDEX, meta),
            "batch": promote(system, Role.SYSTEM_INDEX, meta, entry=meta.atom_role),
            "n_atoms_per_system": make_count(
                torch.bincount(system, minlength=N_SYSTEMS),
                torch.bincount(data["batch"], minlength=N_SYSTEMS),
                system,
                meta,
            ),
        }
        return World(tensors, leaves)


def _weights(shape: tuple[int, ...], phase: float) -> Tensor:
    count = int(np.prod(shape))
    return torch.sin(torch.arange(count, dtype=torch.float64) * 1.3 + phase).reshape(shape) + 0.1


def _derivatives(
    loss: Tensor, leaves: dict[str, Tensor], seed: Any, orders: tuple[int, ...]
) -> list[dict[str, Tensor]]:
    """First derivatives of ``loss`` by the leaves, and those of a sum of them with weights."""
    out, value = [], loss
    for order in orders:
        if not value.requires_grad:
            break
        found = torch.autograd.grad(value, list(leaves.values()), create_graph=order == 1, allow_unused=True)
        grads = dict(zip(leaves, found, strict=True))
        out.append({k: g.detach().clone() for k, g in grads.items() if g is not None})
        parts = [seed(k, g) for k, g in grads.items() if g is not None and g.requires_grad]
        value = sum(parts) if parts else loss.detach()
    return out


def _orders(name: str) -> tuple[int, ...]:
    return (1,) if name.endswith(", once") else (1, 2)


def run_plain(function: Any, name: str) -> dict[str, Any]:
    """A case in one process."""
    world = plain_world()
    out = function(world)
    result: dict[str, Any] = {"value": out.detach().clone(), "grads": []}
    if out.dtype.is_floating_point and out.requires_grad:
        loss = (out * _weights(tuple(out.shape), 0.7)).sum()
        seed = lambda name, g: (g * _weights(tuple(g.shape), 0.2)).sum()
        result["grads"] = _derivatives(loss, world.leaves, seed, _orders(name))
    return result


def run_on_rank(
    part: Part, kind: str, function: Any, name: str, row_dim: int, shape: tuple[int, ...]
) -> dict[str, Any]:
    """A case on one rank; ``shape`` is that of the whole result."""
    world, meta = part.world(), part.meta
    out = function(world)
    role = {"atoms": meta.atom_role, "edges": Role.EDGE, "systems": Role.SYSTEM}[kind]
    result: dict[str, Any] = {"role": getattr(out, "_role", None) is role, "found": getattr(out, "_role", None)}
    plain = to_local(out)
    result["value"] = plain.detach().clone()
    result["row_dim"] = getattr(out, "_row_dim", None) == row_dim or kind == "systems"
    result["grads"] = []
    if plain.dtype.is_floating_point and plain.requires_grad:
        weights = _weights(shape, 0.7)
        if kind == "atoms":
            counted = plain.narrow(row_dim, 0, meta.n_counted)
            loss = (counted * weights.index_select(row_dim, torch.from_numpy(part.ids))).sum()
        elif kind == "edges":
            loss = (plain * weights.index_select(row_dim, torch.from_numpy(part.edges))).sum()
        else:
            loss = (plain * weights).sum()

        def seed(name: str, g: Tensor) -> Tensor:
            weights = _weights(tuple(whole()[name].shape), 0.2)
            if LEAVES[name] == "atoms":
                return (g[: meta.n_counted] * weights[part.ids]).sum()
            return (g * (weights[part.edges] if LEAVES[name] == "edges" else weights)).sum()

        result["grads"] = _derivatives(loss, world.leaves, seed, _orders(name))
    return result


def run_table(comm: Communicator, file: str, policy: str) -> dict[str, Any]:
    """All cases of a module on this rank."""
    module = _module_from(file)
    part = Part(comm, POLICIES[policy])
    out: dict[str, Any] = {"ids": part.ids, "edges": part.edges, "rows": part.rows[: part.meta.n_rows], "cases": {}}
    shapes = _plain_table(file)
    for kind, cases in getattr(module, "CASES", {}).items():
        kind, _, at = kind.partition(" ")
        for name, function in cases.items():
            try:
                shape = tuple(shapes[name]["value"].shape)
                out["cases"][name] = run_on_rank(part, kind, function, name, int(at or 0), shape)
            except Exception as error:
                out["cases"][name] = {"error": f"{type(error).__name__}: {error}"}
    for name, (function, _) in getattr(module, "REFUSED", {}).items():
        try:
            function(part.world())
            out["cases"][name] = {"error": None}
        except DistributedOpError as error:
            out["cases"][name] = {"error": str(error), "op": error.op, "site": error.site}
        except Exception as error:
            out["cases"][name] = {"error": f"{type(error).__name__}: {error}", "op": None, "site": ""}
    return out


@cache
def _plain_table(file: str) -> dict[str, Any]:
    out = {}
    for cases in getattr(_module_from(file), "CASES", {}).values():
        for name, function in cases.items():
            try:
                out[name] = run_plain(function, name)
            except Exception as error:  # reported by the test of this case
                out[name] = {"error": f"{type(error).__name__}: {error}", "value": torch.zeros(0)}
    return out


_TABLES: dict[tuple[str, int, str], Any] = {}


def table(ranks: Any, file: str, world_size: int, policy: str) -> list[dict[str, Any]]:
    """What each rank found for all cases of the module in ``file``; computed once a session."""
    key = (file, world_size, policy)
    if key not in _TABLES:
        try:
            _TABLES[key] = ranks.run(world_size, run_table, file, policy, timeout=60.0)
        except Exception as error:  # once for all cases of the module
            _TABLES[key] = error
    if isinstance(_TABLES[key], Exception):
        raise _TABLES[key]
    return _TABLES[key]


SETUPS = [(n, policy) for n in OWNERS for policy in POLICIES]


def check(ranks: Any, file: str, kind: str, name: str) -> None:
    """One case on every partition: values with their role, first and second derivatives."""
    kind, _, at = kind.partition(" ")
    row_dim = int(at or 0)
    expected = _plain_table(file)[name]
    assert "error" not in expected, f"{name}, one process: {expected['error']}"
    for world_size, policy in SETUPS:
        parts = table(ranks, file, world_size, policy)
        label = f"{name}, {world_size} ranks, {policy}"
        for rank, part in enumerate(parts):
            found = part["cases"][name]
            assert "error" not in found, f"{label}, rank {rank}: {found['error']}"
            assert found["role"], f"{label}: the result is {found['found']}, not {kind}"
            assert found["row_dim"], f"{label}: rows in another dimension"
            assert len(found["grads"]) == len(expected["grads"]), f"{label}: another order of derivatives"
            rows = {"atoms": part["rows"], "edges": part["edges"]}.get(kind)
            value, here = expected["value"], found["value"]
            if kind == "atoms" and not len(part["ids"]):
                continue  # a phantom's rows count nowhere
            if rows is not None:
                value = value.index_select(row_dim, torch.from_numpy(rows))
            _close(here, value, f"{label}, rank {rank}: values")
        for order, grads in enumerate(expected["grads"]):
            for leaf in LEAVES:
                whole_grad = grads.get(leaf)
                _close_gradient(parts, name, order, leaf, whole_grad, f"{label}: derivative {order + 1} by {leaf}")


def _close_gradient(parts, name: str, order: int, leaf: str, expected: Tensor | None, label: str) -> None:
    zeros = torch.zeros_like(whole()[leaf])
    expected = zeros if expected is None else expected
    found = [(part, part["cases"][name]["grads"][order].get(leaf)) for part in parts]
    if LEAVES[leaf] == "parameter":  # each rank has a share
        _close(sum((g for _, g in found if g is not None), zeros), expected, label)
        return
    for part, grad in found:
        ids = {"atoms": part["ids"], "edges": part["edges"]}.get(LEAVES[leaf])
        whole_here = expected if ids is None else expected[ids]
        grad = torch.zeros_like(whole_here) if grad is None else grad[: len(whole_here)]
        _close(grad, whole_here, label)


def _close(found: Tensor, expected: Tensor, label: str) -> None:
    assert found.shape == expected.shape, f"{label}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{label}: {found.dtype}, expected {expected.dtype}"
    if not expected.dtype.is_floating_point:
        assert torch.equal(found, expected), label
        return
    special = ~torch.isfinite(expected)
    assert torch.equal(special, ~torch.isfinite(found)), f"{label}: {found}, expected {expected}"
    assert torch.equal(torch.nan_to_num(found[special]), torch.nan_to_num(expected[special])), label
    found, expected = found[~special], expected[~special]
    if expected.numel():
        error, scale = (found - expected).abs().max(), expected.abs().max()
        assert error <= 1e-12 * scale + 1e-13, f"{label}: differ by {error:.2e}, largest {scale:.2e}"


def check_refused(ranks: Any, file: str, name: str) -> None:
    """The case works in one process, and on every rank raises a DistributedOpError that names op and line."""
    function, op = _module_from(file).REFUSED[name]
    function(plain_world())
    for world_size, policy in SETUPS:
        for rank, part in enumerate(table(ranks, file, world_size, policy)):
            found = part["cases"][name]
            label = f"{name}, {world_size} ranks, {policy}, rank {rank}"
            assert found["error"] is not None, f"{label}: accepted"
            assert found["op"] == op, f"{label}: {found['error']}"
            assert file.rpartition("/")[2] in found["site"], f"{label}: named {found['site']}"


def is_sharded(value: Any) -> bool:
    """Whether ``value`` has a role."""
    return isinstance(value, ShardTensor)
