"""Adapters of Python code: installed while a model runs, restored exactly, nested, in threads, in two models at once."""

from __future__ import annotations

import sys
import threading
import types

import pytest
import spec_parts
import torch

import custom_ops
from nvdd import (
    AdapterRegistry,
    FunctionAdapter,
    InputError,
    JitAdapter,
    MethodAdapter,
    OpAdapter,
    PythonAdapter,
)
from nvdd.communicator import Communicator
from nvdd.context import DDContext, enter
from nvdd.plan import ExchangePlan
from nvdd.roles import ShardMeta


class Parent:
    def inherited(self, x):
        return ("parent", x)


class Model(Parent):
    factor = 3
    identity = torch.nn.Identity()

    def forward(self, x, scale=1):
        """Doubles."""
        return 2 * x * scale

    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def of_class(cls, x):
        return (cls.__name__, x)

    @property
    def size(self):
        return 1


class Child(Model):
    pass


@pytest.fixture
def library():
    """A third-party module."""
    module = types.ModuleType("third_party_library")
    exec("def mol_sum(x):\n    'Sums.'\n    return sum(x)\n\nLIMIT = 4\n\nclass Kind:\n    pass\n", module.__dict__)
    sys.modules["third_party_library"] = module
    yield module
    del sys.modules["third_party_library"]


def context(name: str = "") -> DDContext:
    none = torch.zeros(0, dtype=torch.int64)
    return DDContext(ShardMeta(ExchangePlan.build(Communicator(None), 1, none, none)), name)


def twice(original, self, *args, **kwargs):
    return 2 * original(self, *args, **kwargs)


def add_ten(original, *args, **kwargs):
    return original(*args, **kwargs) + 10


def test_methods_are_wrapped_and_restored():
    before = dict(vars(Model))
    with AdapterRegistry([MethodAdapter(Model, "forward", twice)]) as registry:
        assert Model().forward(1, scale=5) == 20
        assert Child().forward(1) == 4, "a subclass that inherits the method"
        assert Model.forward.__doc__ == "Doubles." and Model.forward.__name__ == "forward"
        (status,) = registry.list_active()
        assert (status.kind, status.state, status.calls) == ("method", "installed", 2)
        assert status.target.endswith("Model.forward") and "test_registry.py:" in status.install_site
    assert dict(vars(Model)) == before and Model().forward(1) == 2
    assert registry.list_active() == [] and registry.statuses()[0].state == "restored"
    assert registry.statuses()[0].calls == 2


def test_the_keyword_form_names_the_class():
    adapter = MethodAdapter(
        module_path="spec_parts", class_name="Block", method_name="forward", replacement=twice
    )
    assert adapter == MethodAdapter(spec_parts.Block, "forward", twice)
    with AdapterRegistry([adapter]):
        assert spec_parts.Block().forward(3) == 12


def test_static_class_and_inherited_methods():
    before = dict(vars(Child))
    adapters = [
        MethodAdapter(Model, "static", add_ten),
        MethodAdapter(Model, "of_class", lambda original, cls, x: (*original(cls, x), "seen")),
        MethodAdapter(Child, "inherited", lambda original, self, x: (original(self, x), "seen")),
    ]
    with AdapterRegistry(adapters):
        assert Model.static(1) == Model().static(1) == 12
        assert Child.of_class(1) == ("Child", 1, "seen")
        assert Child().inherited(2) == (("parent", 2), "seen")
        assert Model().inherited(2) == ("parent", 2)
    assert dict(vars(Child)) == before and Model.static(1) == 2 and Child().inherited(2) == ("parent", 2)


def test_functions_values_and_classes(library):
    original = library.mol_sum
    mine = type("Mine", (), {})
    adapters = [
        FunctionAdapter(library.mol_sum, lambda x: 100 + original(x)),
        PythonAdapter("third_party_library", "LIMIT", 9),
        PythonAdapter("third_party_library", "Kind", mine),
    ]
    with AdapterRegistry(adapters):
        assert library.mol_sum([1, 2]) == 103 and library.LIMIT == 9 and library.Kind is mine
        assert library.mol_sum.__doc__ == "Sums."
    assert library.mol_sum is original and library.LIMIT == 4 and library.Kind is not mine


def test_attributes_of_classes_by_name():
    with AdapterRegistry([PythonAdapter("spec_parts", "Block.forward", lambda self, x: x)]):
        assert spec_parts.Block().forward(3) == 3
    assert spec_parts.Block().forward(3) == 6


def test_callable_objects_are_exchanged_as_they_are(library):
    library.layer, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 2)
    before = library.layer
    with AdapterRegistry([PythonAdapter("third_party_library", "layer", other)]):
        assert library.layer is other and library.layer.out_features == 2
    assert library.layer is before


def test_an_exception_inside_restores(library):
    original, forward = library.mol_sum, Model.forward
    with pytest.raises(ZeroDivisionError), AdapterRegistry(
        [FunctionAdapter(library.mol_sum, lambda x: 1 / 0), MethodAdapter(Model, "forward", twice)]
    ):
        library.mol_sum([])
    assert library.mol_sum is original and Model.forward is forward


@pytest.mark.parametrize("bad", [
    PythonAdapter("third_party_library", "gone", len),
    PythonAdapter("third_party_library", "gone.deeper", len),
    PythonAdapter("no_such_library", "f", len),
    PythonAdapter("third_party_library", "mol_sum"),
    PythonAdapter("third_party_library", "mol_sum", 3),
    MethodAdapter(module_path="third_party_library", class_name="Gone", method_name="f", replacement=twice),
    MethodAdapter(module_path="third_party_library", class_name="Kind", method_name="gone", replacement=twice),
    OpAdapter("nvddtest::gone"),
    JitAdapter("third_party_library", "mol_sum"),
])  # fmt: skip
def test_all_or_nothing(library, bad):
    original, forward = library.mol_sum, Model.forward
    registry = AdapterRegistry([MethodAdapter(Model, "forward", twice), bad])
    with pytest.raises(InputError):
        registry.install()
    assert Model.forward is forward and library.mol_sum is original
    states = {s.target: s for s in registry.statuses()}
    assert states[bad.target].state == "failed" and states[bad.target].error
    assert registry.list_active() == []


def test_nested_blocks_and_other_order_of_ends():
    outer, inner = MethodAdapter(Model, "forward", twice), MethodAdapter(Model, "forward", add_ten)
    forward = Model.forward
    with AdapterRegistry([outer]):
        with AdapterRegistry([inner]):
            assert Model().forward(1) == 14, "the inner one calls the outer one"
        assert Model().forward(1) == 4
    assert Model.forward is forward
    first, second = outer.install(), inner.install()
    first.restore()
    assert Model().forward(1) == 12, "the second stays"
    second.restore()
    second.restore()
    assert Model.forward is forward


def test_one_registry_may_be_entered_twice():
    registry, forward = AdapterRegistry([MethodAdapter(Model, "forward", twice)]), Model.forward
    with registry, registry:
        assert Model().forward(1) == 8
    assert Model.forward is forward and registry.statuses()[0].calls == 2


def test_two_models_replace_the_same_method():
    """Each forward has its own adapters, also in one within the other; outside there are none."""
    one, two, none = context("one"), context("two"), context("none")
    a, b = (AdapterRegistry([MethodAdapter(Model, "forward", body)]) for body in (twice, add_ten))
    with a.installed(one), b.installed(two):
        assert Model().forward(1) == 2, "outside a forward"
        with enter(one):
            assert Model().forward(1) == 4
            with enter(two):
                assert Model().forward(1) == 12
            assert Model().forward(1) == 4
        with enter(none):
            assert Model().forward(1) == 2
    assert [r.statuses()[0].calls for r in (a, b)] == [2, 1]


def test_two_models_in_two_threads():
    """They end in the order in which they began, and neither sees the other's adapter."""
    forward, results, errors = Model.forward, {}, []
    step = threading.Barrier(2, timeout=30)

    def run(name, body, wait_before_end):
        try:
            mine = context(name)
            registry = AdapterRegistry([MethodAdapter(Model, "forward", body)])
            with enter(mine), registry.installed(mine):
                step.wait()
                results[name] = [Model().forward(k) for k in range(200)]
                step.wait()
                if wait_before_end:
                    step.wait()
            if not wait_before_end:
                step.wait()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=a) for a in (("a", twice, False), ("b", add_ten, True))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not errors
    assert results == {"a": [4 * k for k in range(200)], "b": [2 * k + 10 for k in range(200)]}
    assert Model.forward is forward


def test_two_models_that_want_other_values_at_once(library):
    one, two = context("one"), context("two")
    with AdapterRegistry([PythonAdapter("third_party_library", "LIMIT", 5)]).installed(one):
        with pytest.raises(InputError, match="another model that runs now"):
            AdapterRegistry([PythonAdapter("third_party_library", "LIMIT", 6)]).install(two)
        assert library.LIMIT == 5
    assert library.LIMIT == 4


def test_two_adapters_of_one_target(library):
    with pytest.raises(InputError, match=r"two adapters for third_party_library.mol_sum: one from .*test_registry.py"):
        AdapterRegistry([PythonAdapter("third_party_library", "mol_sum", f) for f in (len, max)])
    with pytest.raises(InputError, match="is not an adapter"):
        AdapterRegistry([len])


def test_a_declaration_is_completed(library):
    registry = AdapterRegistry([PythonAdapter("third_party_library", "mol_sum")])
    with pytest.raises(InputError, match=r"add it in the wrapper's distributed_setup\(ctx\): ctx.adapters.add"):
        registry.install()
    registry.add(PythonAdapter("third_party_library", "mol_sum", max))
    registry.add(PythonAdapter("third_party_library", "mol_sum"))
    with registry:
        assert library.mol_sum([1, 5]) == 5


REFUSED = {
    "neither class nor names": (lambda: MethodAdapter(None, "forward", twice), "give a class"),
    "class and names": (lambda: MethodAdapter(Model, "forward", twice, class_name="Model"), "give a class"),
    "an object": (lambda: MethodAdapter(Model(), "forward", twice), "is not a class"),
    "no such method": (lambda: MethodAdapter(Model, "gone", twice), "Model has no method 'gone'"),
    "a value as method": (lambda: MethodAdapter(Model, "factor", twice), "has no method 'factor'"),
    "no body": (lambda: MethodAdapter(Model, "forward"), "replacement=None can't be called"),
    "no name": (lambda: PythonAdapter("", "f"), "module_path='' is not a name"),
    "a method as function": (lambda: FunctionAdapter(Model.forward), "is not a function of a module"),
    "a scripted function": (lambda: FunctionAdapter(custom_ops.scripted_square), "use JitAdapter"),
    "marshal with a replacement": (lambda: JitAdapter("m", "f", len, mode="marshal"), "leave the replacement out"),
    "another mode": (lambda: JitAdapter("m", "f", mode="magic"), "neither 'eager' nor 'marshal'"),
    "a callable object as method": (lambda: MethodAdapter(Model, "identity", twice).install(), "only functions can be wrapped"),
    "a property": (lambda: PythonAdapter("spec_parts", "Block.size", len).install(), "has no 'size' to replace"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        make()


def test_a_function_that_is_found_under_another_name(library):
    moved = library.mol_sum
    library.mol_sum = len
    moved.__module__ = "third_party_library"
    with pytest.raises(InputError, match="is something else than the function that was given"):
        FunctionAdapter(moved, len)


def test_properties_are_refused():
    spec_parts.Block.size = property(lambda self: 1)
    try:
        with pytest.raises(InputError, match="is a property"):
            PythonAdapter("spec_parts", "Block.size", len).install()
    finally:
        del spec_parts.Block.size


def test_scripted_functions_run_as_python():
    scripted = custom_ops.scripted_square
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(3).as_subclass(Watched)
    custom_ops.scripted_square(x)
    assert seen == [], "torch does not tell a subclass of scripted functions"
    with AdapterRegistry([JitAdapter("custom_ops", "scripted_square")]):
        assert torch.equal(custom_ops.scripted_square(x), torch.ones(3))
        assert "mul" in " ".join(seen)
    assert custom_ops.scripted_square is scripted
