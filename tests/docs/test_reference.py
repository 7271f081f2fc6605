"""The reference is whole: every public name is on a page and says what it is; so do environment variables."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import numpy as np

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGES = ("nvdd", "nvdd_ase", "nvdd_lammps")
CODE = ("core", "specs", "models", "nvdd_ase", "lammps_plugin")
DEVELOPMENT = ("dev", ".ci/run", "tools", "examples", "tests", "benchmarks")


@pytest.fixture(scope="module")
def reference():
    """docs/_ext/reference.py, which makes the pages."""
    pytest.importorskip(
        "sphinx", reason="Sphinx makes the reference; requirements/docs.txt has it, ./dev env installs it"
    )
    spec = importlib.util.spec_from_file_location("reference", DOCS / "_ext" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def public(package: str) -> list[tuple[str, Any]]:
    module = importlib.import_module(package)
    return [(name, getattr(module, name)) for name in module.__all__ if name != "__version__"]


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that the class itself defines."""
    for name, value in vars(cls).items():
        inner = getattr(value, "__func__", value.fget if isinstance(value, property) else value)
        if not name.startswith("_") and inspect.isfunction(inner):
            yield name, inner


def docs_of(cls: type, name: str = "") -> str:
    """Docstrings of a class and its bases, with those of the method of that name."""
    bases = [base for base in cls.__mro__ if base is not object]
    values = [*bases, *(vars(base)[name] for base in bases if name in vars(base))]
    return "\n".join(getattr(value, "__doc__", None) or "" for value in values)


def without_docstring(package: str) -> list[str]:
    missing = []
    for name, value in public(package):
        if (inspect.isclass(value) or inspect.isfunction(value)) and not (value.__doc__ or "").strip():
            missing.append(name)
        if inspect.isclass(value):
            missing += [f"{name}.{m}" for m, _ in methods(value) if not inspect.getdoc(getattr(value, m))]
    return missing


def unnamed_parameters(package: str) -> list[str]:
    """Parameters that no docstring of theirs names: the function's, the class's, or those of its bases."""
    missing = []

    def look(where: str, function: Any, text: str) -> None:
        for parameter in inspect.signature(function).parameters:
            hidden = parameter in ("self", "cls") or parameter.startswith("_")
            if not hidden and not re.search(rf"(?<!\w){re.escape(parameter)}(?!\w)", text):
                missing.append(f"{where}({parameter})")

    for name, value in public(package):
        if inspect.isfunction(value):
            look(name, value, value.__doc__ or "")
        elif inspect.isclass(value):
            if "__init__" in vars(value):  # also a dataclass's
                look(name, value, docs_of(value))
            for method, function in methods(value):
                look(f"{name}.{method}", function, docs_of(value, method))
    return missing


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_symbol_has_a_docstring(package):
    assert not without_docstring(package)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_name_every_parameter(package):
    assert not unnamed_parameters(package)


def test_what_lacks_words_is_found(monkeypatch):
    """The two checks above see a class, a method and parameters without."""
    nvdd_ase = importlib.import_module("nvdd_ase")

    class Silent:
        """Has words, for size."""

        def __init__(self, size: int, shape: int) -> None: ...

        def grow(self, by: int) -> None: ...

    monkeypatch.setattr(nvdd_ase, "Silent", Silent, raising=False)
    monkeypatch.setattr(nvdd_ase, "__all__", ["Silent"])
    assert without_docstring("nvdd_ase") == ["Silent.grow"]
    assert unnamed_parameters("nvdd_ase") == ["Silent(shape)", "Silent.grow(by)"]


# -- shapes, units, errors ----------------------------------------------------------------------------------------------

TENSOR = re.compile(r"(?:torch\.|np\.)?(?:Tensor|ndarray)(?: \| None)?")  # an annotation
SHAPE = re.compile(r"\([^()]*(?:\([^()]*\))?[^()]*,[^()]*\)|any shape|its shape|as it is")
# A and s with what stands before a unit, not the article and the genitive
UNIT = re.compile(
    r"(?<![\w`])(eV|eV/A|eV/A\^[23]|fs|1/fs|K|GPa|amu|seconds|bytes|bytes/s)(?![\w`])|(?:[:,)\d] |in |float64 )(A|s)(?![\w`])"
)
ELSEWHERE = re.compile(r"(?:as (?:for|in|of)|see|as) +`")
#: names of parameters and attributes that have a unit
PHYSICAL = re.compile(
    "positions|cells?|cutoff|bond_cutoff|skin|ghost_width|migration_hysteresis|velocities|masses|total_mass|forces|energy|energies|"
    "stress|volume|timestep|temperature|pressure|friction|tau|tau_t|tau_p|tau_cell|fmax|maxstep|kinetic|latency|bandwidth|"
    "start_timeout|timeout|edge_vectors|time"
)


def entries(text: str, name: str) -> list[str]:
    """Of docstrings the paragraphs, and the items of lists of arguments, that name a parameter or attribute."""
    parts = re.split(r"\n[ \t]*\n|\n(?=[ \t]*[\w`*, ]+: )", text)
    return [part for part in parts if re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", part)]


def annotated(package: str) -> Iterator[tuple[str, str, str, str]]:
    """(place, name, annotation, docstrings) of each parameter and dataclass field; of what is returned the name is empty."""

    def look(where: str, function: Any, text: str, returned: bool = True) -> Iterator[tuple[str, str, str, str]]:
        for name, annotation in getattr(function, "__annotations__", {}).items():
            if name != "return":
                yield f"{where}({name})", name, str(annotation), text
            elif returned:
                yield where, "", str(annotation), text

    for name, value in public(package):
        if inspect.isfunction(value):
            yield from look(name, value, inspect.cleandoc(value.__doc__ or ""))
        elif inspect.isclass(value):
            if "__init__" in vars(value):  # also a dataclass's
                yield from look(name, value.__init__, docs_of(value), returned=False)
            for method, function in methods(value):
                text = docs_of(value, method) if list(inspect.signature(function).parameters)[1:] else inspect.getdoc(function)
                yield from look(f"{name}.{method}", function, text or "")


def without_shape(package: str) -> list[str]:
    """Tensors and arrays of which no docstring says the shape."""
    missing = []
    for where, name, annotation, text in annotated(package):
        told = entries(text, name) if name else [text]
        if TENSOR.fullmatch(annotation) and not any(SHAPE.search(part) or ELSEWHERE.search(part) for part in told):
            missing.append(where)
    return missing


def without_unit(package: str) -> list[str]:
    """Physical quantities of which no docstring says the unit."""
    missing = []
    for where, name, annotation, text in annotated(package):
        last = where.rpartition(".")[2]
        quantity = name or (last if not last.endswith(")") else "")
        if not PHYSICAL.fullmatch(quantity) or annotation in ("None", "bool") or "CellRelaxation" in annotation:
            continue
        told = entries(text, name) if name else [text]
        if not any(UNIT.search(part) or ELSEWHERE.search(part) for part in told):
            missing.append(where)
    return missing


def raised(function: Any) -> set[str]:
    """Errors that the function's own lines raise, by name; not those of what it calls."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found.add(getattr(node.exc.func, "id", getattr(node.exc.func, "attr", "")))
    return found


def untold_errors(package: str) -> list[str]:
    """Errors that a public function raises and its docstring, or its class's, does not name."""
    missing = []
    for name, value in public(package):
        functions = [(name, value, value.__doc__ or "")] if inspect.isfunction(value) else []
        if inspect.isclass(value):
            for own in ("__init__", "__post_init__"):
                if inspect.isfunction(vars(value).get(own)) and "<string>" not in vars(value)[own].__code__.co_filename:
                    functions.append((name, vars(value)[own], docs_of(value)))
            functions += [(f"{name}.{m}", function, docs_of(value, m)) for m, function in methods(value)]
        for where, function, text in functions:
            missing += [f"{where}: {error}" for error in sorted(raised(inspect.unwrap(function))) if error not in text]
    return missing


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("lacking", [without_shape, without_unit, untold_errors], ids=lambda f: f.__name__)
def test_docstrings_say_shapes_units_and_errors(package, lacking):
    assert not lacking(package)


def test_missing_shapes_units_and_errors_are_found(monkeypatch):
    """The three checks above see what is missing, and what is there."""
    nvdd_ase = importlib.import_module("nvdd_ase")

    class Silent:
        """Has ``forces`` and ``where``.

        Args:
            positions: (n, 3) A.
            cell: rows are vectors.
            where: any shape.
            skin: margin of the search.
        """

        def __init__(self, positions: np.ndarray, cell: np.ndarray, where: np.ndarray, skin: float) -> None:
            if skin < 0:
                raise ValueError(skin)

        def forces(self) -> np.ndarray:
            """Newton's.

            Raises:
                TypeError: always.
            """
            raise TypeError("no forces")

    monkeypatch.setattr(nvdd_ase, "Silent", Silent, raising=False)
    monkeypatch.setattr(nvdd_ase, "__all__", ["Silent"])
    assert without_shape("nvdd_ase") == ["Silent(cell)", "Silent.forces"]
    assert without_unit("nvdd_ase") == ["Silent(cell)", "Silent(skin)", "Silent.forces"]
    assert untold_errors("nvdd_ase") == ["Silent: ValueError"]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_symbol_is_on_one_page(reference, package):
    found = []
    for page in DOCS.glob("*.md"):
        for name, modules in reference.PUBLIC.findall(page.read_text()):
            if name == package:
                found += reference.chosen(package, set(modules.split()))
    assert sorted(found) == sorted(name for name, _ in public(package))


def test_constants_say_what_they_are(reference):
    """By `#:` before their definition; the reference refuses one without."""
    for package in PACKAGES:
        for name, value in public(package):
            if not inspect.isclass(value) and not inspect.isfunction(value):
                assert list(reference._auto(package, name))


def test_the_page_of_the_command_line_has_every_command(reference):
    from nvdd_ase.cli import app

    page = reference.command_line()
    for command in app.registered_commands:
        assert f"## `nvdd {command.name or command.callback.__name__.strip('_').replace('_', '-')}`" in page


# -- environment variables --------------------------------------------------------------------------------------------


def variables(places: tuple[str, ...]) -> set[str]:
    """Names NVDD_... in code: what programs may read or set."""
    found = set()
    for place in places:
        path = ROOT / place
        files = [path] if path.is_file() else [f for f in path.rglob("*") if f.suffix in (".py", ".sh", ".cpp", ".h")]
        for file in files:
            text = file.read_text()
            if file.suffix in (".cpp", ".h"):  # there NVDD_ also begins the names of macros
                found |= set(re.findall(r'getenv\("(NVDD_\w+)"', text))
            elif file != Path(__file__):
                found |= set(re.findall(r"\bNVDD_[A-Z_]+\b(?!=\{)", text))  # not a definition of a macro)
    return found


def test_environment_variables_are_in_the_table():
    page = (DOCS / "environment.md").read_text()
    used, development, _ = (set(re.findall(r"`(NVDD_\w+)`", part)) for part in page.split("\n## ")[1:4])
    assert used == variables(CODE)
    assert development == variables(DEVELOPMENT) - used
