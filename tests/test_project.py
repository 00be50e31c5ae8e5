"""The house rules that a machine can check: imports, sizes, private names, an import without effects."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "lance_ray_stream"
ROOT = Path(__file__).parents[1]

# From the bottom up. A module imports from its own layer and from those below, never in a circle. A
# subpackage is one module here, "" is the package itself. A new module has to be given its place.
LAYERS = {
    "pure": {"errors", "display", "layout", "position", "permutation", "row_order", "cursor", "state", "uris"},
    "lance": {"table", "spec", "epoch_plan", "indexed_plan", "plan", "memory", "reader", "window_reader", "tags"},
    "ray": {
        "ray_internals",
        "collate",
        "planner",
        "feed",
        "progress",
        "provenance",
        "datasource",
        "transforms",
        "batches",
        "insight",
        "resources",
        "rank_facts",
        "next_epoch",
        "reading",
        "iterator",
        "data_config",
        "read",
        "protection",
        "train",
        "elastic",
    },
    "package": {""},
    "users": {"backends", "testing", "explore", "cli", "__main__"},
}
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
# Private names by their spelling, public by their documentation.
STANDARD_NAMES = {"_replace", "_asdict", "_fields", "_exit"}


@dataclass(frozen=True, kw_only=True)
class Import:
    """``from module import name`` or, without a name, ``import module``; absolute."""

    module: str
    name: str | None

    @property
    def path(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"

    @property
    def root(self) -> str:
        return self.module.split(".")[0]

    @property
    def is_private(self) -> bool:
        return any(_is_private(part) for part in self.path.split("."))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def sources() -> dict[str, list[Path]]:
    """Module -> its files; a subpackage counts as one module."""
    files: dict[str, list[Path]] = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        part = path.relative_to(ROOT / PACKAGE).with_suffix("").parts[0]
        files.setdefault("" if part == "__init__" else part, []).append(path)
    return files


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def nodes(module: str) -> Iterator[tuple[Path, ast.AST]]:
    for path in sources()[module]:
        for node in ast.walk(parse(path)):
            yield path, node


def imports(module: str) -> Iterator[Import]:
    """Every import of a module, those inside functions included."""
    for path, node in nodes(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module=alias.name, name=None)
        elif isinstance(node, ast.ImportFrom):
            parents = list(path.relative_to(ROOT).parts[:-1])
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module_path = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                yield Import(module=module_path, name=alias.name)


def own_imports(module: str) -> set[str]:
    """The modules of this package that ``module`` imports."""
    found = set()
    for item in imports(module):
        if item.root == PACKAGE:
            part = item.module.removeprefix(PACKAGE).strip(".").split(".")[0]
            # ``from lance_ray_stream import plan`` imports a module, or something that the package offers.
            found.add(part or (item.name if item.name in sources() else "") or "")
    return found - {module}


def layer_of(module: str) -> int:
    for number, members in enumerate(LAYERS.values()):
        if module in members:
            return number
    raise AssertionError(f"{module!r} has no place in LAYERS: decide which layer it belongs to")


MODULES = sorted(sources())


def test_every_module_has_one_layer() -> None:
    for module in MODULES:
        layer_of(module)
    listed = [module for members in LAYERS.values() for module in members]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards(module: str) -> None:
    upwards = {other for other in own_imports(module) if layer_of(other) > layer_of(module)}
    assert not upwards, f"{module} imports from a layer above its own: {sorted(upwards)}"


def test_imports_make_no_circle() -> None:
    graphlib.TopologicalSorter({module: own_imports(module) for module in MODULES}).prepare()


@pytest.mark.parametrize("module", [m for m in MODULES if m in LAYERS["pure"]])
def test_pure_modules_use_the_standard_library_and_numpy_alone(module: str) -> None:
    foreign = {item.root for item in imports(module)} - set(sys.stdlib_module_names) - {"numpy", PACKAGE}
    assert not foreign, f"{module} is meant to be pure and imports {sorted(foreign)}"


@pytest.mark.parametrize("module", [m for m in MODULES if m in LAYERS["lance"]])
def test_reading_knows_nothing_of_ray(module: str) -> None:
    assert not {"ray", "torch"} & {item.root for item in imports(module)}


@pytest.mark.parametrize("path", sorted((ROOT / PACKAGE).rglob("*.py")), ids=lambda path: path.stem)
def test_modules_and_functions_are_short(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines < MAX_MODULE_LINES
    functions = (n for n in ast.walk(parse(path)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    lengths = {function.name: (function.end_lineno or 0) - function.lineno + 1 for function in functions}
    too_long = {name: length for name, length in lengths.items() if length >= MAX_FUNCTION_LINES}
    assert not too_long


@pytest.mark.parametrize(("library", "home"), [("ray", "ray_internals"), ("lancedb", "table")])
def test_private_imports_have_one_home(library: str, home: str) -> None:
    for module in set(MODULES) - {home}:
        private = [item.path for item in imports(module) if item.root == library and item.is_private]
        assert not private, f"{module} imports private names of {library}; their home is {home}"


@cache
def own_private_names() -> set[str]:
    """Private names that the package itself defines, or assigns on ``self``, anywhere."""
    names = set()
    for module in MODULES:
        for _, node in nodes(module):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
                names.add(node.attr)
    return {name for name in names if _is_private(name)}


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in {"self", "cls"}


@pytest.mark.parametrize("module", [m for m in MODULES if m not in {"ray_internals", "table"}])
def test_foreign_private_attributes_have_one_home(module: str) -> None:
    foreign = {
        f"{path.name}:{node.lineno}: {ast.unparse(node)}"
        for path, node in nodes(module)
        if isinstance(node, ast.Attribute)
        and _is_private(node.attr)
        and not _is_own(node.value)
        and node.attr not in own_private_names() | STANDARD_NAMES
    }
    assert not foreign, "private names of Ray belong into ray_internals, those of lancedb into table.py"


@pytest.mark.parametrize("module", [m for m in MODULES if m in LAYERS["ray"] - {"ray_internals"}])
def test_private_methods_of_ray_are_overridden_in_one_place(module: str) -> None:
    import ray.data
    import ray.train

    public_bases = [ray.data.DataIterator, ray.data.Dataset, ray.data.Datasource, ray.train.DataConfig]
    of_ray = {name for base in public_bases for name in dir(base) if _is_private(name)}
    from_ray = {item.name for item in imports(module) if item.root == "ray" and item.name}
    for path, node in nodes(module):
        if not isinstance(node, ast.ClassDef):
            continue
        bases = {ast.unparse(base).split(".")[0] for base in node.bases}
        if not bases & (from_ray | {"ray"}):
            continue
        methods = {item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}
        overridden = sorted(methods & of_ray)
        assert not overridden, f"{path.name}: {node.name} overrides private methods of Ray"


IMPORT_SCRIPT = """
import multiprocessing, sys
import lance_ray_stream as lrs

lrs.SplitLayout(8)
lrs.StreamDataConfig(num_workers=2)
ray, torch = sys.modules.get("ray"), sys.modules.get("torch")
assert multiprocessing.get_start_method(allow_none=True) is None, "a global start method was set"
assert ray is None or not ray.is_initialized(), "Ray was started"
assert torch is None or not torch.distributed.is_initialized(), "torch.distributed was started"
assert torch is None or not torch.cuda.is_initialized(), "CUDA was started"
print("nothing was started")
"""


@pytest.mark.timeout(120)
@pytest.mark.skipif("" not in sources(), reason="the package has no __init__.py yet")
def test_c45_import_has_no_side_effects() -> None:
    """C45: importing the package and building its objects starts neither Ray, torch.distributed nor CUDA."""
    done = subprocess.run([sys.executable, "-c", IMPORT_SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "nothing was started"
