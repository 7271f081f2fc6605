"""Names of sums of models, ``"mace:x + dftd3:pbe"``, with options for each block."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nvdd.errors import InputError

_JOINED = re.compile(r"(?<=\s)\+(?=\s)")
_OF_A_PATH = re.compile(r"[/\\.]")
_DOTTED = re.compile(r"([^.\s]+)\.(.+)")
WIRES = "wires"  # an option that every block has
BLOCKS = "block_options"  # the one option of a sum, in the form in which `load` takes it


def is_composed(model: str) -> bool:
    """Whether the name is one of a sum of models."""
    return len(_pieces(model)) > 1


def parts(model: str) -> list[str]:
    """The names of the blocks; of a model by itself its own."""
    found = _pieces(model)
    if not all(found):
        raise InputError(
            f"{model!r}: write the blocks of a sum as 'mace:my.model + lj', with a model on each side of ' + '"
        )
    return found


def _pieces(model: str) -> list[str]:
    found: list[str] = []
    for piece in _JOINED.split(model):
        # no family has such a name: this is the rest of a path, "mace:runs/a + b/my.model"
        if found and _OF_A_PATH.search(piece.partition(":")[0]):
            found[-1] += "+" + piece
        else:
            found.append(piece)
    return [piece.strip() for piece in found]


def families_of(model: str) -> list[str]:
    """The family of each block."""
    return [part.partition(":")[0] for part in parts(model)]


def normal_options(model: str, options: Any) -> dict[str, Any]:
    """Options of a model as keyword arguments of `nvdd.models.load`.

    Args:
        model: its name.
        options: of a model by itself, a mapping. Of a sum: a list with a mapping for each block; or a mapping with keys
            ``"dftd3.cutoff"`` (the block's family) or ``"1.cutoff"`` (its number, from 0); the name of the block may be
            left out where only one of them has the option. ``wires`` is an option of every block of a sum: see
            `read_wires`.

    Raises:
        InputError: there is no such block, or it is unknown whose option one is.
    """
    if not is_composed(model):
        if isinstance(options, Sequence) and not isinstance(options, str):
            raise InputError(f"{model!r} is one model: its options are a mapping, not a list of them ({options!r})")
        return dict(options or {})
    names = parts(model)
    if isinstance(options, Mapping) and BLOCKS in options:
        if beside := sorted(map(str, options.keys() - {BLOCKS})):
            raise InputError(
                f"{model!r}: the options {', '.join(beside)} stand beside {BLOCKS}, which has those of every block: put them "
                "into the mapping of their block"
            )
        options = options[BLOCKS]
    if options is None or isinstance(options, Mapping):
        options = _by_block(names, options or {})
    if isinstance(options, str) or not isinstance(options, Sequence):
        raise InputError(f"the options of {model!r} must be a mapping, or a list of one for each block, got {options!r}")
    if len(options) != len(names):
        raise InputError(
            f"{model!r} has {len(names)} blocks, but there are options for {len(options)}: give one mapping for each"
        )
    for k, given in enumerate(options):
        if given is not None and not isinstance(given, Mapping):
            raise InputError(f"the options of block {k} ({names[k]}) must be a mapping or None, got {given!r}")
        if given and not all(isinstance(name, str) for name in given):
            raise InputError(f"the options of block {k} ({names[k]}) must have names that are texts, got {given!r}")
    return {BLOCKS: [dict(given or {}) for given in options]}


def _by_block(names: list[str], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{} for _ in names]
    for key, value in options.items():
        if not isinstance(key, str):
            raise InputError(f"option {key!r}: the name of an option is text, such as '0.cutoff'")
        dotted = _DOTTED.fullmatch(key)
        k = _block(names, dotted[1], f"option {key!r}") if dotted else _only_block_with(names, key)
        name = dotted[2] if dotted else key
        if name in found[k]:
            raise InputError(f"option {key!r}: {name!r} of block {k} ({names[k]}) is given twice")
        found[k][name] = value
    return found


def _block(names: list[str], word: str, label: str) -> int:
    """The block that a family's name or a number means."""
    named = [k for k, name in enumerate(names) if name.partition(":")[0] == word]
    if len(named) == 1:
        return named[0]
    if word.isdecimal() and int(word) < len(names):
        return int(word)
    blocks = ", ".join(f"{k} ({name})" for k, name in enumerate(names))
    why = f"{len(named)} blocks are {word}: use a number" if named else f"there is no block {word}"
    raise InputError(f"{label}: {why}; the blocks are {blocks}")


def _only_block_with(names: list[str], key: str) -> int:
    from nvdd.models.registry import families

    known = families()
    having = [
        k for k, name in enumerate(names) if key in ((known.get(name.partition(":")[0]) and known[name.partition(":")[0]].options) or {})
    ]  # fmt: skip
    if len(having) == 1:
        return having[0]
    blocks = ", ".join(f"{k}.{key} ({name})" for k, name in enumerate(names))
    raise InputError(f"whose option is {key!r}? Write the block before it: {blocks}")


def check(model: str, options: Mapping[str, Any]) -> None:
    """What can be said without building anything; raises what `load` would raise."""
    from nvdd.models import registry

    given = normal_options(model, options)[BLOCKS]
    names = parts(model)
    for k, (name, mine) in enumerate(zip(names, given, strict=True)):
        read_wires(names, k, mine.get(WIRES))
        registry.check(name, mine.keys() - {WIRES})


def load(model: str, dtype: Any, options: Mapping[str, Any]) -> Any:
    """The `PipelineModelWrapper` of a sum; its blocks in ``dtype``, None for their own."""
    from nvdd.models import registry
    from nvdd.models.pipeline import PipelineModelWrapper

    names, given = parts(model), normal_options(model, options)[BLOCKS]
    wires: dict[tuple[int, str], Any] = {}
    blocks = []
    for k, (name, mine) in enumerate(zip(names, given, strict=True)):
        wires.update({(k, key): source for key, source in read_wires(names, k, mine.get(WIRES)).items()})
        rest = {key: value for key, value in mine.items() if key != WIRES}
        blocks.append(registry.load(name, dtype=dtype, **rest))
    return PipelineModelWrapper(blocks, wires)


def read_wires(names: list[str], k: int, given: Any) -> dict[str, tuple | None]:
    """Inputs of block ``k`` -> ``(block, output)``, ``(block, output, "fixed")`` or None.

    ``given`` is a mapping, ``{"charges": (0, "charges")}`` or ``{"charges": "aimnet2.charges"}``, or a text as on a
    command line: ``"charges=aimnet2.charges"``, several with commas between; ``"charges=aimnet2.charges.fixed"``;
    ``"charges=own"`` for the atoms' own.
    """
    if not given:
        return {}
    label = f"wires of block {k} ({names[k]})"
    if isinstance(given, str):
        items = [item.partition("=") for item in given.split(",")]
        if not all(key.strip() and equals and value.strip() for key, equals, value in items):
            raise InputError(
                f"{label}: cannot read {given!r}; write INPUT=BLOCK.OUTPUT, such as charges=aimnet2.charges"
            )
        given = {key.strip(): value.strip() for key, _, value in items}
    if not isinstance(given, Mapping):
        raise InputError(f"{label} must be a mapping of inputs, such as {{'charges': (0, 'charges')}}, got {given!r}")
    return {key: _source(names, label, value) for key, value in given.items()}


def _source(names: list[str], label: str, value: Any) -> tuple | None:
    if value is None or value == "own":
        return None
    if isinstance(value, str):
        word, *rest = value.split(".")
        if len(rest) not in (1, 2) or rest[1:] not in ([], ["fixed"]):
            raise InputError(f"{label}: {value!r} is not BLOCK.OUTPUT, BLOCK.OUTPUT.fixed or own")
        return (_block(names, word, label), *rest)
    if not isinstance(value, tuple | list):
        raise InputError(f"{label}: {value!r} is not (block, output), (block, output, 'fixed'), a text or None")
    return tuple(value)
