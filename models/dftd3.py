"""DFT-D3 dispersion: the wrapper, its options, its family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nvdd.edge_sums import sum_over_edges
from nvdd.errors import InputError
from nvdd.models.base import BaseModelMixin, Batch, ModelConfig, ModelOutputs, NeighborConfig
from nvdd.models.dftd3_data import DAMPINGS, INSTALL, complete, damping_parameters, references
from nvdd.models.dftd3_terms import coordination_numbers, mixing, pair_energies
from nvdd.models.precise import StaysFloat64
from nvdd.models.registry import ModelFamily
from nvdd.shard_tensor import is_traced, to_local
from nvdd.specs import SPEC_DFTD3_HALO, MLIPSpec
from nvdd.verbs import refresh_neighbors

# What s-dftd3 takes when nothing else is said, in Bohr: pairs, coordination numbers, triples
_DEFAULT_CUTOFFS = {"cutoff": 60.0, "cutoff_cn": 40.0, "cutoff_atm": 40.0}
_ATM_RADII = 4.0 / 3.0  # scale of R0 in the three-body term


class DFTD3ModelWrapper(StaysFloat64, BaseModelMixin):
    """DFT-D3 (Grimme et al., J. Chem. Phys. 132, 154104, 2010; BJ damping: J. Comput. Chem. 32, 1456, 2011).

    The energy of a pair is ``-C6 (s6 f6(r) / r^6 + s8 (C8/C6) f8(r) / r^8)``. C6 depends on the coordination numbers
    of both atoms; over several ranks those of neighbours are fetched. Each term has a cutoff of its own. All is
    computed in float64, whatever ``to(dtype)`` says.

    Args:
        functional: whose published parameters are used: ``"pbe"``, ``"r2scan"``, ``"b3lyp"``, ... (s-dftd3's names).
        damping: ``"bj"`` (rational, Becke-Johnson), ``"zero"``, and the refits ``"bjm"``, ``"zerom"`` (Smith et al.,
            J. Phys. Chem. Lett. 7, 2197, 2016).
        atm: whether to add the three-body (Axilrod-Teller-Muto) term. It costs the square of the number of
            neighbours within ``cutoff_atm`` for each atom.
        cutoff: A, of the energy of pairs. Default 60 Bohr (31.75 A), as in s-dftd3.
        cutoff_cn: A, of coordination numbers. Default 40 Bohr (21.17 A).
        cutoff_atm: A, of all three sides of a triple. Default 40 Bohr.
        parameters: instead of a functional: s8, a1, a2 (Bohr), or for zero damping s8, rs6; optional s6, s9, rs8, alp,
            bet (1/Bohr). A mapping, or text ``"s8:0.7875,a1:0.4289,a2:4.4407"``.

    Attributes:
        options: the arguments in full, as JSON can hold them.
        coefficients: the damping parameters by name; a2 in Bohr, bet in 1/Bohr.

    Raises:
        InputError: a value that makes no sense, an unknown functional, elements beyond lawrencium (from a ``forward``
            on the CPU; on a GPU, where that check would cost a synchronisation, NaN).
        MissingDependencyError: tad-dftd3, which has the reference data, is missing.
    """

    def __init__(
        self,
        functional: str | None = None,
        *,
        damping: str = "bj",
        atm: bool | str = False,
        cutoff: float | str | None = None,
        cutoff_cn: float | str | None = None,
        cutoff_atm: float | str | None = None,
        parameters: Mapping[str, float] | str | None = None,
    ) -> None:
        super().__init__()
        from ase.units import Bohr

        if damping not in DAMPINGS:
            raise InputError(f"dftd3: damping={damping!r} is not known; use one of {', '.join(DAMPINGS)}")
        self.atm = _yes_or_no("atm", atm)
        if (functional is None) == (parameters is None):
            raise InputError(
                f"dftd3: give a functional, as in dftd3:pbe, or parameters=, not {'both' if functional else 'neither'}"
            )
        if functional is not None:
            self.coefficients = damping_parameters(functional, damping)
        else:
            self.coefficients = complete(_split(parameters) if isinstance(parameters, str) else parameters, damping)
        given = {"cutoff": cutoff, "cutoff_cn": cutoff_cn, "cutoff_atm": cutoff_atm}
        radii = {
            name: _DEFAULT_CUTOFFS[name] * Bohr if value is None else _positive(name, value)
            for name, value in given.items()
        }
        self.functional, self.damping = functional, damping
        self.cutoff, self.cutoff_cn, self.cutoff_atm = radii.values()
        self.options = {
            "functional": functional,
            "damping": damping,
            "atm": self.atm,
            **radii,
            "parameters": None if functional is not None else self.coefficients,
        }
        self._set_tables()
        widest = max(self.cutoff, self.cutoff_cn, self.cutoff_atm if self.atm else 0.0)
        self.model_config = ModelConfig(
            neighbor_config=NeighborConfig(cutoff=widest, blocks=True), elements=frozenset(range(1, len(self.reference_cn)))
        )

    def _set_tables(self) -> None:
        """The reference data in A and eV; buffers, so that they go where the module goes."""
        from ase.units import Bohr, Hartree

        data, p = references(), self.coefficients
        self.rational = DAMPINGS[self.damping]
        self._exponent = (p["alp"] + 2.0) / 6.0
        self._s9 = p["s9"] / Hartree**0.5  # C9 is the root of a product of three C6
        self._damping = [p["s6"], p["s8"], p["rs6"], p["rs8"], p["alp"], p["bet"] / Bohr]
        ratio = 3.0 * data.r4r2[:, None] * data.r4r2
        radius = p["a1"] * ratio.sqrt() + p["a2"] if self.rational else data.vdw
        tables = {
            "radii": data.covalent * Bohr,
            "reference_cn": data.cn,
            "c6": data.c6 * (Hartree * Bohr**6),
            "c8_over_c6": ratio * Bohr**2,
            "radius": radius * Bohr,
            "triple_radius": data.vdw * (_ATM_RADII * Bohr),
        }
        for name, table in tables.items():
            self.register_buffer(name, table.contiguous(), persistent=False)

    def forward(self, data: Batch) -> ModelOutputs:
        """``{"energies": (n_atoms,)}``, eV: half of each pair's energy and a third of each triple's to its atoms."""
        numbers = to_local(refresh_neighbors(data.atomic_numbers, pad=True))
        self._check_elements(numbers)
        n, of_elements = data.n_atoms, (self.reference_cn, self.c6)

        def count(vectors: Tensor, receivers: Tensor, senders: Tensor) -> Tensor:
            return coordination_numbers(vectors.double(), receivers, senders, numbers, self.radii, self.cutoff_cn, n)

        cn = to_local(refresh_neighbors(sum_over_edges(data, count), pad=True))
        made = [] if is_traced() else list(mixing(cn.detach(), numbers, *of_elements))

        def pairs(vectors: Tensor, receivers: Tensor, senders: Tensor, cn: Tensor) -> Tensor:
            return pair_energies(
                vectors.double(), cn, receivers, senders, numbers, *of_elements, self.c8_over_c6, self.radius, self.rational,
                self._damping, self.cutoff, n, made,
            )  # fmt: skip

        def triples(vectors: Tensor, receivers: Tensor, senders: Tensor, cn: Tensor) -> Tensor:
            return self._triples(vectors.double(), cn, receivers, senders, numbers, of_elements, n, made)

        energies = sum_over_edges(data, pairs, cn)
        if self.atm:
            energies = energies + sum_over_edges(data, triples, cn)
        return ModelOutputs(energies=energies)

    def _triples(self, vectors, cn, receivers, senders, numbers, of_elements, n_atoms: int, made: list[Tensor]) -> Tensor:
        from nvdd.models.dftd3_triples import triple_energies  # a kernel that takes its time to compile

        near = (vectors.detach().square().sum(1) < self.cutoff_atm**2).nonzero().squeeze(1)
        near = near[receivers[near].argsort(stable=True)]
        return triple_energies(
            vectors[near], cn, receivers[near], senders[near], numbers, *of_elements, self.triple_radius,
            self._s9, self._exponent, self.cutoff_atm, n_atoms, made,
        )  # fmt: skip

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """`SPEC_DFTD3_HALO`, whatever the strategy."""
        return SPEC_DFTD3_HALO

    @property
    def dtype(self) -> torch.dtype:
        """float64."""
        return torch.float64

    def extra_repr(self) -> str:
        """The options, for ``print(wrapper)``."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value is not None)

    def _check_elements(self, numbers: Tensor) -> None:
        if numbers.device.type != "cpu" or is_traced() or not numbers.numel():
            return
        largest = len(self.reference_cn) - 1
        if not 1 <= int(numbers.min()) <= int(numbers.max()) <= largest:
            from ase.data import chemical_symbols

            unknown = sorted(set(numbers[(numbers < 1) | (numbers > largest)].tolist()))
            raise InputError(
                f"dftd3: no reference data for {', '.join(chemical_symbols[z] for z in unknown)}; D3 has the elements from "
                "hydrogen to lawrencium"
            )


def _yes_or_no(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if str(value).lower() not in words:
        raise InputError(f"dftd3: {name}={value!r} is neither true nor false; write {name}=true")
    return words[str(value).lower()]


def _positive(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        default = _DEFAULT_CUTOFFS[name]
        raise InputError(f"dftd3: {name}={value!r} is not a positive length in A; leave it out for {default:.0f} Bohr")
    return number


def _split(text: str) -> dict[str, str]:
    """``"s8:0.7875,a1:0.4289"`` -> ``{"s8": "0.7875", "a1": "0.4289"}``."""
    items = [item.split(":") for item in text.split(",")]
    if any(len(item) != 2 for item in items):
        raise InputError(f"dftd3: cannot read parameters={text!r}; write e.g. s8:0.7875,a1:0.4289,a2:4.4407")
    return {name.strip(): value.strip() for name, value in items}


def build(checkpoint: str | None = None, *, dtype: torch.dtype | None = None, **options: Any) -> DFTD3ModelWrapper:
    """The wrapper from ``"dftd3:pbe"`` and options; always float64."""
    return DFTD3ModelWrapper(checkpoint, **options)


def rebuild(configuration: dict[str, Any], dtype: torch.dtype) -> DFTD3ModelWrapper:
    """The correction with the given ``options``; see ``DFTD3ModelWrapper.options``."""
    return DFTD3ModelWrapper(**configuration)


FAMILY = ModelFamily(
    name="dftd3",
    description="DFT-D3 dispersion; the functional after the colon, as in dftd3:pbe",
    build=build,
    options={
        "damping": "bj, zero, bjm or zerom (default bj)",
        "atm": "true: with the three-body term (default false)",
        "cutoff": "A, of pairs (default 31.75, that is 60 Bohr)",
        "cutoff_cn": "A, of coordination numbers (default 21.17, that is 40 Bohr)",
        "cutoff_atm": "A, of triples (default 21.17, that is 40 Bohr)",
        "parameters": "instead of a functional: s8:0.7875,a1:0.4289,a2:4.4407",
    },
    package="tad_dftd3",
    install=INSTALL,
    licence="data of tad-dftd3, Apache-2.0",
    configuration=lambda wrapper: dict(wrapper.options),
    rebuild=rebuild,
)
