"""`MLIPSpec`: everything that a model declares about its distribution."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from nvdd.adapters import Adapter, OpAdapter
from nvdd.errors import InputError
from nvdd.policy import StoragePolicy
from nvdd.specs import merge
from nvdd.specs.compiling import CompilePolicy, ForceStrategy
from nvdd.specs.distribution import DistributionSpec, adapters
from nvdd.specs.outputs import OutputKind, OutputSpec, Reduce


@dataclass(frozen=True, init=False)
class MLIPSpec:
    """What a model needs from the distributed framework.

    Attributes:
        distribution: storage policy, custom operations, third-party helpers.
        outputs: name -> :class:`OutputSpec`.
        force_strategy: what forces are derived from.
        adapters: adapters of any kind, beside those of ``distribution``.
        compile_policy: what the model needs of ``torch.compile``; None if it has no wishes.
        name: for messages.

    Outputs are given by ``outputs={"energies": OutputSpec(OutputKind.PER_NODE)}``, or in three parts by
    ``output_kinds={"energies": OutputKind.PER_NODE}`` with ``all_reduce_outputs`` and ``owned_only_outputs``.

    Specs are values. ``with_...`` gives a copy with something changed or added; ``spec | other`` is the spec of a
    model that does what both do (the table is in `nvdd.specs.merge`). `save` and `load` keep one in a JSON file.
    """

    distribution: DistributionSpec
    outputs: Mapping[str, OutputSpec]
    force_strategy: ForceStrategy
    adapters: tuple[Adapter, ...]
    compile_policy: CompilePolicy | None
    name: str

    def __init__(
        self,
        distribution: DistributionSpec | None = None,
        outputs: Mapping[str, OutputSpec] | None = None,
        *,
        output_kinds: Mapping[str, OutputKind] | None = None,
        all_reduce_outputs: Iterable[str] = (),
        owned_only_outputs: Iterable[str] = (),
        force_strategy: ForceStrategy = ForceStrategy.EDGE_VECTORS,
        adapters: Iterable[Adapter] = (),
        compile_policy: CompilePolicy | None = None,
        name: str = "",
    ) -> None:
        merged = _outputs(outputs or {}, output_kinds or {}, all_reduce_outputs, owned_only_outputs)
        values = (
            distribution if distribution is not None else DistributionSpec(),
            MappingProxyType(merged),
            ForceStrategy(force_strategy),
            tuple(adapters),
            compile_policy,
            name,
        )
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)
        self._check()

    def _check(self) -> None:
        for field, kind in (("distribution", DistributionSpec), ("name", str)):
            if not isinstance(getattr(self, field), kind):
                raise ValueError(f"MLIPSpec: {field}={getattr(self, field)!r} is not a {kind.__name__}")
        if not isinstance(self.compile_policy, (CompilePolicy, type(None))):
            raise ValueError(f"MLIPSpec: compile_policy={self.compile_policy!r} is not a CompilePolicy")
        adapters("MLIPSpec: its adapters", self.all_adapters)

    # -- what is in it

    @property
    def all_adapters(self) -> tuple[Adapter, ...]:
        """Custom operations, third-party helpers and the other adapters."""
        return (*self.distribution.custom_ops, *self.distribution.third_party_helpers, *self.adapters)

    @property
    def output_kinds(self) -> dict[str, OutputKind]:
        """Output name -> kind."""
        return {key: spec.kind for key, spec in self.outputs.items()}

    @property
    def all_reduce_outputs(self) -> frozenset[str]:
        """Outputs of which each rank holds a share."""
        return frozenset(k for k, s in self.outputs.items() if s.reduce is Reduce.ALL_REDUCE)

    @property
    def owned_only_outputs(self) -> frozenset[str]:
        """Per-atom outputs whose owned rows are final as they are."""
        return frozenset(k for k, s in self.outputs.items() if s.reduce is Reduce.OWNED_ONLY)

    # -- copies

    def _with(self, **changes: Any) -> MLIPSpec:
        values = {field.name: getattr(self, field.name) for field in fields(self)} | changes
        return MLIPSpec(**values)

    def with_policy(self, policy: StoragePolicy) -> MLIPSpec:
        """With another storage policy."""
        return self._with(distribution=replace(self.distribution, policy=policy))

    def with_outputs(self, outputs: Mapping[str, OutputSpec] | None = None, /, **more: OutputSpec) -> MLIPSpec:
        """With more outputs, or others of the same names."""
        return self._with(outputs={**self.outputs, **(outputs or {}), **more})

    def with_custom_ops(self, *ops: OpAdapter) -> MLIPSpec:
        """With more custom operations, ``ops``."""
        return self._with(distribution=replace(self.distribution, custom_ops=(*self.distribution.custom_ops, *ops)))

    def with_third_party_helpers(self, *helpers: Adapter) -> MLIPSpec:
        """With more adapters of Python code."""
        present = self.distribution.third_party_helpers
        return self._with(distribution=replace(self.distribution, third_party_helpers=(*present, *helpers)))

    def with_adapters(self, *more: Adapter) -> MLIPSpec:
        """With more adapters of any kind."""
        return self._with(adapters=(*self.adapters, *more))

    def with_force_strategy(self, force_strategy: ForceStrategy) -> MLIPSpec:
        """With another force strategy."""
        return self._with(force_strategy=force_strategy)

    def with_compile_policy(self, compile_policy: CompilePolicy | None) -> MLIPSpec:
        """With another compile policy."""
        return self._with(compile_policy=compile_policy)

    def with_name(self, name: str) -> MLIPSpec:
        """With another name."""
        return self._with(name=name)

    def __or__(self, other: object) -> MLIPSpec:
        """The spec of a model that does what both do.

        Raises:
            SpecConflictError: they can't be composed; the message names both sides.
        """
        if not isinstance(other, MLIPSpec):
            return NotImplemented
        names = (self.name, other.name)
        return MLIPSpec(
            merge.merge_distributions(self.distribution, other.distribution, names),
            merge.merge_outputs(self.outputs, other.outputs, names),
            force_strategy=merge.merge_force_strategies(self.force_strategy, other.force_strategy, names),
            adapters=merge.merge_adapters(self.adapters, other.adapters, "adapters", names),
            compile_policy=merge.merge_compile_policies(self.compile_policy, other.compile_policy, names),
            name=merge.merge_names(*names),
        )

    # -- files

    def to_dict(self) -> dict[str, Any]:
        """The spec as JSON values, with the version of the format.

        Raises:
            InputError: an adapter has a replacement that another process could not find.
        """
        from nvdd.specs.serialize import spec_to_json

        return spec_to_json(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> MLIPSpec:
        """The spec that `to_dict` gave as ``content``; its form is docs/spec-format.md.

        Raises:
            InputError: a newer version, an unknown or missing field, an operation that is not registered.
        """
        from nvdd.specs.serialize import spec_from_json

        return spec_from_json(content)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the spec to ``path``, a JSON file."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    @classmethod
    def load(cls, path: str | os.PathLike) -> MLIPSpec:
        """Reads the spec from ``path``, a JSON file. Modules that register its operations must be imported before.

        Raises:
            InputError: there is no such file, or it is not a spec; as `from_dict`.
        """
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
        except FileNotFoundError:
            raise InputError(f"no spec file {os.fspath(path)} (working directory {os.getcwd()})") from None
        except ValueError as error:
            raise InputError(f"the spec file {os.fspath(path)} is not JSON: {error}") from error
        try:
            return cls.from_dict(content)
        except InputError as error:
            raise InputError(f"the spec file {os.fspath(path)} can't be used: {error}") from error

    def __hash__(self) -> int:
        outputs = frozenset(self.outputs.items())
        return hash((self.distribution, outputs, self.force_strategy, self.adapters, self.compile_policy, self.name))

    def __reduce__(self) -> tuple[Any, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return _rebuild, (values | {"outputs": dict(self.outputs)},)


def _rebuild(values: dict[str, Any]) -> MLIPSpec:
    return MLIPSpec(**values)


def _outputs(
    outputs: Mapping[str, OutputSpec],
    kinds: Mapping[str, OutputKind],
    all_reduce: Iterable[str],
    owned_only: Iterable[str],
) -> dict[str, OutputSpec]:
    merged = dict(outputs)
    for key, spec in merged.items():
        if not isinstance(key, str) or not isinstance(spec, OutputSpec):
            raise ValueError(f"MLIPSpec: outputs has {key!r}: {spec!r}; write a name and an OutputSpec(OutputKind....)")
    for key, kind in kinds.items():
        if key in merged and merged[key].kind is not OutputKind(kind):
            raise ValueError(f"MLIPSpec: output {key!r} is {merged[key].kind} in outputs and {kind} in output_kinds")
        merged.setdefault(key, OutputSpec(OutputKind(kind)))
    for keys, reduce in ((all_reduce, Reduce.ALL_REDUCE), (owned_only, Reduce.OWNED_ONLY)):
        for key in keys:
            if key not in merged:
                raise ValueError(f"MLIPSpec: {reduce.value} output {key!r} is not declared in outputs or output_kinds")
            if merged[key].reduce not in (Reduce.NONE, reduce):
                raise ValueError(
                    f"MLIPSpec: output {key!r} is declared both {merged[key].reduce.value} and {reduce.value}"
                )
            merged[key] = replace(merged[key], reduce=reduce)
    return merged
