"""Orb's files: a file of weights says nothing of the network, so the architecture comes by name or as a description."""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from nvdd.errors import InputError, MissingDependencyError
from nvdd.models.building import building

INSTALL = "pip install 'orb-models>=0.5.5,<0.6'"

_MATERIALS = {
    f"orb-v3-{kind}-{name}-{data}": {"kind": f"v3_{kind}", "max_num_neighbors": neighbors}
    for kind in ("conservative", "direct")
    for data in ("omat", "mpa")
    for name, neighbors in (("20", 20), ("inf", 120))
}
_MOLECULES = {
    f"orb-v3-{kind}-omol": {
        "kind": f"v3_{kind}", "max_num_neighbors": 120, "has_charge_spin_cond": True, "has_stress": False,
    }
    for kind in ("conservative", "direct")
}  # fmt: skip
_DISPERSION = {
    f"separate-{method}-{n}layer": {"kind": "v3_direct", "max_num_neighbors": 120, "num_message_passing_steps": n}
    for method in ("d3", "d4")
    for n in (3, 5)
}
_V2 = {
    name: {"kind": "v2", "max_num_neighbors": 20, "num_message_passing_steps": n}
    for name, n in (("orb-v2", 15), ("orb-mptraj-only-v2", 15), ("orb-d3-v2", 15), ("orb-d3-sm-v2", 10), ("orb-d3-xs-v2", 5))
}
# name of a pretrained model -> its architecture
PRETRAINED: dict[str, dict[str, Any]] = {**_MATERIALS, **_MOLECULES, **_DISPERSION, **_V2}
_KINDS = ("v3_conservative", "v3_direct", "v2")


def import_orb() -> None:
    """Raises MissingDependencyError where orb-models is missing, or lacks a package that it needs."""
    try:
        import orb_models.forcefield.pretrained  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"Orb models need orb-models ({sys.executable}; {error}): {INSTALL}") from error


def build_model(architecture: dict[str, Any]) -> torch.nn.Module:
    """A model with random weights in float32 on the CPU.

    Args:
        architecture: ``kind`` (``v3_conservative``, ``v3_direct``, ``v2``), ``max_num_neighbors``, ``radius`` in A (6), and
            arguments of the function of that kind in ``orb_models.forcefield.pretrained``.

    Raises:
        InputError: an unknown kind or argument.
    """
    import_orb()
    from orb_models.forcefield import atomic_system, pretrained

    rest = dict(architecture)
    kind = rest.pop("kind", None)
    if kind not in _KINDS:
        raise InputError(f"orb: kind={kind!r} of an architecture is not one of {', '.join(_KINDS)}")
    config = atomic_system.SystemConfig(
        radius=float(rest.pop("radius", 6.0)), max_num_neighbors=int(rest.pop("max_num_neighbors", 20))
    )
    make = getattr(pretrained, f"orb_{kind}_architecture")
    with building(torch.float32):
        try:
            return make(device="cpu", system_config=config, **rest)
        except TypeError as error:
            raise InputError(f"orb: architecture {architecture}: {error}") from error


def load_file(
    name_or_path: str | None, architecture: Any, max_num_neighbors: int | None
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model of a pretrained name, or of a file of weights; and its architecture.

    Raises:
        InputError: no name, a file without architecture, weights that are not on this machine (nothing is ever
            downloaded), a file that is none of weights, or of weights of another architecture.
    """
    import_orb()
    if name_or_path is None:
        raise InputError(f"'orb' needs a model: orb:FILE with architecture=, or orb: and one of {', '.join(PRETRAINED)}")
    path = Path(name_or_path).expanduser()
    if path.is_file():
        described = _described(architecture)
    elif name_or_path in PRETRAINED:
        described, path = dict(PRETRAINED[name_or_path]), _cached(name_or_path)
    else:
        raise InputError(
            f"no file {name_or_path!r} (working directory {os.getcwd()}), and no pretrained Orb model of that name; names: "
            f"{', '.join(PRETRAINED)}"
        )
    if max_num_neighbors is not None:
        described["max_num_neighbors"] = int(max_num_neighbors)
    model = build_model(described)
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(weights, strict=True)
    except Exception as error:  # whatever a file of another kind leads to
        raise InputError(
            f"{path} can't be read as weights of the Orb architecture {described}: {type(error).__name__}: {error}"
        ) from error
    missing = model.state_dict().keys() - weights.keys()
    if any(key.startswith("heads.") for key in missing) and any(key.startswith("heads.") for key in weights):
        raise InputError(f"{path} has no weights for {sorted(missing)[0]} of the Orb architecture {described}")
    return model, described


def _described(architecture: Any) -> dict[str, Any]:
    if isinstance(architecture, str) and architecture.lstrip().startswith("{"):
        try:
            architecture = json.loads(architecture)
        except ValueError as error:
            raise InputError(f"orb: architecture={architecture!r} is not JSON: {error}") from error
    if isinstance(architecture, str) and architecture in PRETRAINED:
        return dict(PRETRAINED[architecture])
    if isinstance(architecture, dict):
        return dict(architecture)
    raise InputError(
        f"orb: a file of weights does not say what network it is of; give architecture= a name ({', '.join(PRETRAINED)}) or a "
        f'description such as {{"kind": "v3_conservative", "max_num_neighbors": 20}}, not {architecture!r}'
    )


def _cached(name: str) -> Path:
    """Where orb-models has put the weights of a pretrained model when it downloaded them."""
    from cached_path import get_cache_dir
    from cached_path.util import find_latest_cached
    from orb_models.forcefield import pretrained

    url = inspect.signature(pretrained.ORB_PRETRAINED_MODELS[name]).parameters["weights_path"].default
    found = find_latest_cached(url, get_cache_dir())
    if found is None:
        raise InputError(
            f"the weights of {name!r} are not on this machine, and nvdd downloads nothing: get {url} and load the file, "
            f"orb:FILE with architecture={name}"
        )
    return Path(found)
