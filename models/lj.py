"""The Lennard-Jones pair potential: the wrapper, its options, its family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nvdd.errors import InputError
from nvdd.model_config import ModelConfig, NeighborConfig
from nvdd.models.base import BaseModelMixin, Batch, ModelOutputs
from nvdd.models.lj_kernel import lj_energies
from nvdd.models.registry import ModelFamily
from nvdd.shard_tensor import is_traced, to_local
from nvdd.specs import SPEC_LJ_HALO, MLIPSpec

SHIFTS = ("none", "energy", "smooth")
MIXINGS = ("geometric", "arithmetic")
_DTYPES = (torch.float32, torch.float64)
_N_ELEMENTS = 119  # atomic numbers 0 (ASE's "X") to 118


class LennardJonesModelWrapper(torch.nn.Module, BaseModelMixin):
    """Lennard-Jones: ``phi(r) = 4 epsilon [(sigma/r)^12 - (sigma/r)^6]`` for r < cutoff.

    ``epsilon`` and ``sigma`` are numbers (all elements alike) or one value an element,
    ``{"Ar": 0.0104, "Ne": 0.0031}``. Each option may also be a string, as on a command line: ``"0.0104"``,
    ``"Ar:0.0104,Ne:0.0031"``.

    Args:
        epsilon: depth of the well, eV. Default 1, as in ASE.
        sigma: distance at which phi is zero, A. Default 1, as in ASE.
        cutoff: A. Default 3 times the largest sigma of a pair.
        shift: ``"none"``: cut off, not shifted (LAMMPS ``pair_style lj/cut``);
            ``"energy"``: ``phi(cutoff)`` taken off (LAMMPS ``pair_modify shift yes``, ASE ``smooth=False``);
            ``"smooth"``: times a switch between onset and cutoff that leaves energy and forces continuous
            (ASE ``smooth=True``; ``cutoff_function`` in ase/calculators/lj.py).
        onset: A, where the switch of ``shift="smooth"`` begins. Default 0.66 times the cutoff, as in ASE.
        mixing: what unlike elements get, in the words of LAMMPS's ``pair_modify mix``: the geometric mean
            of epsilon, and of sigma the ``"geometric"`` or the ``"arithmetic"`` mean.
        pair_coeffs: what some unlike pairs get instead, ``{"Ar-Ne": (0.0055, 3.1)}``: epsilon, sigma;
            as a string ``"Ar-Ne:0.0055:3.1"``, several with commas between.
        dtype: type of the parameters and the arithmetic; torch.float64 (default) or torch.float32.

    Attributes:
        options: the arguments in full, as JSON can hold them, without ``dtype``.
        epsilon, sigma, offset: (n_species, n_species) buffers: eV, A, and the eV taken off each pair.
            With elements, they have a last row and column of NaN, for atoms that are none of them.
        species_of_number: (119,) int64 buffer, atomic number -> row of these.

    Raises:
        InputError: a value that makes no sense, from the constructor; an element without parameters, from a
            ``forward`` on the CPU. On a GPU, where that check would cost a synchronisation, it gives NaN.
    """

    def __init__(
        self,
        *,
        epsilon: float | str | Mapping[str, float] = 1.0,
        sigma: float | str | Mapping[str, float] = 1.0,
        cutoff: float | str | None = None,
        shift: str = "none",
        onset: float | str | None = None,
        mixing: str = "geometric",
        pair_coeffs: str | Mapping[str, tuple[float, float]] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        shift, mixing = _one_of("shift", shift, SHIFTS), _one_of("mixing", mixing, MIXINGS)
        if dtype not in _DTYPES:
            raise InputError(f"lj: dtype={dtype!r} is not known; use torch.float64 or torch.float32")
        depths, sizes = _values("epsilon", epsilon), _values("sigma", sigma)
        by_element = isinstance(depths, dict)
        if by_element != isinstance(sizes, dict) or (by_element and depths.keys() != sizes.keys()):
            raise InputError(
                f"lj: epsilon={epsilon!r} and sigma={sigma!r} are not for the same elements; "
                "give both as numbers, or both for each element"
            )
        symbols = list(depths) if by_element else []
        special = _pair_coeffs(pair_coeffs, symbols)
        table_e, table_s = _mixed(depths, sizes, mixing, symbols, special)

        largest = table_s.max().item()
        self.cutoff = 3.0 * largest if cutoff is None else _number("cutoff", cutoff)
        if not self.cutoff > 0:
            raise InputError(
                f"lj: cutoff={self.cutoff!r} A (given: {cutoff!r}) must be positive; "
                f"3 times the largest sigma ({largest} A) is usual"
            )
        if onset is not None and shift != "smooth":
            raise InputError(f"lj: onset={onset!r} goes with shift='smooth', not with {shift!r}; drop one")
        self.onset = 0.66 * self.cutoff if onset is None else _number("onset", onset)
        if not self.onset < self.cutoff:
            raise InputError(f"lj: onset={onset!r} A must be below the cutoff, {self.cutoff} A")
        self.shift, self.mixing = shift, mixing
        self.options = {
            "epsilon": depths,
            "sigma": sizes,
            "cutoff": self.cutoff,
            "shift": shift,
            "onset": self.onset if shift == "smooth" else None,
            "mixing": mixing,
            "pair_coeffs": {"-".join(pair): list(values) for pair, values in special.items()} or None,
        }

        table_o = torch.zeros_like(table_e)
        if shift == "energy":
            c6 = (table_s / self.cutoff) ** 6
            table_o = 4.0 * table_e * (c6 * c6 - c6)
        species_of_number = torch.zeros(_N_ELEMENTS, dtype=torch.int64)
        elements = None
        if by_element:
            numbers = [_atomic_number("epsilon", s, epsilon) for s in symbols]
            elements = frozenset(numbers)
            # other elements get a row of NaN: on a GPU that stands in for an error
            table_e, table_s, table_o = map(_with_unknown, (table_e, table_s, table_o))
            species_of_number.fill_(len(symbols))
            species_of_number[numbers] = torch.arange(len(symbols))
        self.register_buffer("epsilon", table_e.to(dtype))
        self.register_buffer("sigma", table_s.to(dtype))
        self.register_buffer("offset", table_o.to(dtype))
        self.register_buffer("species_of_number", species_of_number)
        self.model_config = ModelConfig(neighbor_config=NeighborConfig(cutoff=self.cutoff, drops_far_edges=True), elements=elements)

    def forward(self, data: Batch) -> ModelOutputs:
        """``{"energies": (n_atoms,)}``, eV: half of each pair's energy to each of its atoms."""
        numbers = to_local(data.atomic_numbers)
        species, sender_species = self.species_of_number[numbers], None
        if self.model_config.elements is not None:
            # by the index as given: over several ranks it reads remote senders, too
            sender_species = self.species_of_number[to_local(data.atomic_numbers[data.senders])]
            self._check_elements(numbers, species)
        energies = lj_energies(
            to_local(data.edge_vectors).to(self.dtype),
            to_local(data.receivers),
            species,
            sender_species,
            self.epsilon,
            self.sigma,
            self.offset,
            self.cutoff,
            self.onset if self.shift == "smooth" else self.cutoff,
        )
        return ModelOutputs(energies=energies)

    def distribution_spec(self, strategy: Any = None) -> MLIPSpec:
        """`SPEC_LJ_HALO`, whatever the strategy."""
        return SPEC_LJ_HALO

    def extra_repr(self) -> str:
        """The options, for ``print(wrapper)``."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value is not None)

    def _check_elements(self, numbers: Tensor, species: Tensor) -> None:
        if species.device.type != "cpu" or is_traced():
            return
        unknown = species == self.epsilon.shape[0] - 1
        if unknown.any():
            from ase.data import chemical_symbols

            names = [chemical_symbols[z] for z in numbers[unknown].unique().tolist()]
            known = ", ".join(self.options["epsilon"])
            raise InputError(
                f"lj: no parameters for {', '.join(names)}; epsilon and sigma are given for {known}: "
                "add the missing elements to both"
            )


def build(
    checkpoint: str | None = None, *, dtype: torch.dtype | None = None, **options: Any
) -> LennardJonesModelWrapper:
    """The wrapper from ``"lj"`` and options; the family has no checkpoints."""
    if checkpoint:
        raise InputError(
            f"lj:{checkpoint}: Lennard-Jones has no checkpoints; "
            "write 'lj' and give options, e.g. epsilon=0.0104 sigma=3.4"
        )
    unknown = options.keys() - FAMILY.options.keys()
    if unknown:
        raise InputError(f"lj: no option {', '.join(sorted(unknown))}; there are {', '.join(FAMILY.options)}")
    return LennardJonesModelWrapper(dtype=dtype or torch.float64, **options)


def from_calculator(calculator: Any) -> LennardJonesModelWrapper | None:
    """The same potential as an ``ase.calculators.lj.LennardJones``; None for any other object."""
    from ase.calculators.lj import LennardJones

    if type(calculator) is not LennardJones:  # a subclass may compute something else
        return None
    p = calculator.parameters
    smooth = {"shift": "smooth", "onset": p.ro} if p.smooth else {"shift": "energy"}
    return LennardJonesModelWrapper(epsilon=p.epsilon, sigma=p.sigma, cutoff=p.rc, **smooth)


def rebuild(configuration: dict[str, Any], dtype: torch.dtype) -> LennardJonesModelWrapper:
    """The potential with the given ``options``; see ``LennardJonesModelWrapper.options``."""
    return LennardJonesModelWrapper(dtype=dtype, **configuration)


FAMILY = ModelFamily(
    name="lj",
    description="Lennard-Jones pair potential",
    build=build,
    options={
        "epsilon": "eV, a number or one for each element: Ar:0.0104,Ne:0.0031 (default 1)",
        "sigma": "A, likewise (default 1)",
        "cutoff": "A (default 3 times the largest sigma)",
        "shift": "none, energy (zero at the cutoff) or smooth (default none)",
        "onset": "A, where shift=smooth begins (default 0.66 times the cutoff)",
        "mixing": "geometric or arithmetic, for unlike elements (default geometric)",
        "pair_coeffs": "epsilon and sigma of unlike pairs: Ar-Ne:0.0055:3.1",
    },
    licence="MIT",
    from_calculator=from_calculator,
    configuration=lambda wrapper: dict(wrapper.options),
    rebuild=rebuild,
)


def _mixed(
    depths: float | dict[str, float],
    sizes: float | dict[str, float],
    mixing: str,
    symbols: list[str],
    special: dict[tuple[str, str], tuple[float, float]],
) -> tuple[Tensor, Tensor]:
    """Epsilon and sigma of each pair of species, (n_species, n_species) each."""
    e = torch.tensor(list(depths.values()) if symbols else [depths], dtype=torch.float64)
    s = torch.tensor(list(sizes.values()) if symbols else [sizes], dtype=torch.float64)
    table_e = (e[:, None] * e).sqrt()
    table_s = (s[:, None] * s).sqrt() if mixing == "geometric" else (s[:, None] + s) / 2
    # the square root of a square may be off in its last bit
    table_e.diagonal().copy_(e)
    table_s.diagonal().copy_(s)
    for (a, b), (pair_e, pair_s) in special.items():
        i, j = symbols.index(a), symbols.index(b)
        table_e[i, j] = table_e[j, i] = pair_e
        table_s[i, j] = table_s[j, i] = pair_s
    return table_e, table_s


def _with_unknown(table: Tensor) -> Tensor:
    return torch.nn.functional.pad(table, (0, 1, 0, 1), value=math.nan)


def _one_of(name: str, value: Any, words: tuple[str, ...]) -> str:
    if value not in words:
        raise InputError(f"lj: {name}={value!r} is not known; use one of {', '.join(words)}")
    return value


def _number(name: str, value: Any) -> float:
    """A finite number >= 0 from a number or its text."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise InputError(f"lj: {name}={value!r} is not a number >= 0; give one, e.g. {name}=1.0")
    return number


def _values(name: str, value: Any) -> float | dict[str, float]:
    """A number, or a number by symbol, from what the user gave."""
    if isinstance(value, str) and ":" in value:
        value = _split(name, value, n_values=1)
    if not isinstance(value, Mapping):
        return _number(name, value)
    if not value:
        raise InputError(f"lj: {name}={value!r} names no element; give e.g. {name}='Ar:1.0'")
    for symbol in value:
        _atomic_number(name, symbol, value)
    return {symbol: _number(f"{name}[{symbol}]", v) for symbol, v in value.items()}


def _pair_coeffs(value: Any, symbols: list[str]) -> dict[tuple[str, str], tuple[float, float]]:
    """``{("Ar", "Ne"): (epsilon, sigma)}`` from what the user gave."""
    if not value:
        return {}
    remedy = "give e.g. pair_coeffs='Ar-Ne:0.0055:3.1', with epsilon and sigma for each of the elements"
    pairs = _split("pair_coeffs", value, n_values=2) if isinstance(value, str) else value
    if not isinstance(pairs, Mapping):
        raise InputError(f"lj: pair_coeffs={value!r} is not a mapping; {remedy}")
    out: dict[tuple[str, str], tuple[float, float]] = {}
    for key, coeffs in pairs.items():
        pair = tuple(str(key).split("-"))
        if len(pair) != 2 or pair[0] == pair[1] or not set(pair) <= set(symbols):
            raise InputError(f"lj: pair_coeffs has {key!r}, which is not two different elements of {symbols}; {remedy}")
        if pair in out or pair[::-1] in out:
            raise InputError(f"lj: pair_coeffs={value!r} has {key!r} twice; leave one out")
        if not isinstance(coeffs, (tuple, list)) or len(coeffs) != 2:
            raise InputError(f"lj: pair_coeffs[{key}]={coeffs!r} is not an epsilon and a sigma; {remedy}")
        out[pair] = tuple(_number(f"pair_coeffs[{key}]", c) for c in coeffs)
    return out


def _split(name: str, text: str, n_values: int) -> dict[str, Any]:
    """``"Ar:1,Ne:2"`` -> ``{"Ar": "1", "Ne": "2"}``; with two values, tuples of texts."""
    out: dict[str, Any] = {}
    for item in text.split(","):
        key, *values = (part.strip() for part in item.split(":"))
        if len(values) != n_values or key in out:
            form = ":".join(["Ar" if n_values == 1 else "Ar-Ne", *["1.0"] * n_values])
            raise InputError(f"lj: cannot read {item!r} in {name}={text!r}; write each once, like {form}")
        out[key] = values[0] if n_values == 1 else tuple(values)
    return out


def _atomic_number(name: str, symbol: Any, given: Any) -> int:
    from ase.data import atomic_numbers  # imported here: ASE takes its time

    if symbol not in atomic_numbers:
        raise InputError(f"lj: {symbol!r} in {name}={given!r} is not a chemical symbol; write e.g. 'Ar'")
    return atomic_numbers[symbol]
