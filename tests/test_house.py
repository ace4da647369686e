"""The house: who may import whom, how large a room may be, and what an import costs."""

import ast
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"tq_cache": ROOT / "tq_cache", "tq_cli": ROOT / "tq_cli", "tq_kernels": ROOT / "kernels/tq_kernels"}

# Rooms of tq_cache, the ground first: each may import itself and what stands before it.
ORDER = (
    "version",
    "compat",
    "parallel",
    "formats",
    "backends",
    "storage",
    "planning",
    "checkpoint",
    "hf",
    "report",
    "saving",
    "cache",
    "generation",
    "tools",
)


def modules(package: str) -> dict[str, Path]:
    """Every module, by its name in full."""
    base = PACKAGES[package]
    paths = {".".join([package, *path.relative_to(base).with_suffix("").parts]): path for path in base.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in paths.items()}


def imports(name: str, path: Path) -> Iterator[str]:
    """Full names of what a module imports, wherever in it: modules, or names in modules."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def graph(package: str) -> dict[str, set[str]]:
    """Which modules of the same package each module imports."""
    names = modules(package)
    edges: dict[str, set[str]] = {}
    for name, path in names.items():
        found = {x if x in names else x.rpartition(".")[0] for x in imports(name, path)}
        edges[name] = {x for x in found if x in names and x != name}
    return edges


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_goes_in_a_circle(package):
    TopologicalSorter(graph(package)).prepare()  # raises CycleError, which names them


def test_rooms_import_only_what_stands_below_them():
    for name, found in graph("tq_cache").items():
        room = name.split(".")[1] if "." in name else "cache"
        if name in ("tq_cache", "tq_cache.__main__"):
            continue
        wrong = {x for x in found if ORDER.index(x.split(".")[1]) > ORDER.index(room)}
        assert not wrong, f"{name} imports {wrong}"


def test_kernels_import_torch_and_triton_alone():
    allowed = {"torch", "triton", "tq_kernels"} | sys.stdlib_module_names
    for name, path in modules("tq_kernels").items():
        assert {x.split(".")[0] for x in imports(name, path)} <= allowed, name


def test_one_module_knows_the_kernels_and_one_imports_it():
    door = "tq_cache.backends.triton"  # imported when it is first needed
    found = {name: set(imports(name, path)) for name, path in modules("tq_cache").items()}
    assert {name for name, x in found.items() if any(y.startswith("tq_kernels") for y in x)} == {door}
    assert {name for name, x in found.items() if any(y.startswith(door) for y in x)} == {"tq_cache.backends"}


@pytest.mark.parametrize(("module", "unknown"), [
    ("tq_cache.planning.layers", ("torch", "transformers")),
    ("tq_cache.formats", ("transformers",)),
    ("tq_cache.backends", ("transformers",)),
    ("tq_cache.storage.growing", ("transformers",)),
])  # fmt: skip
def test_what_rooms_do_not_know(module, unknown):
    for name, path in modules("tq_cache").items():
        if name == module or name.startswith(module + "."):
            assert not {x.split(".")[0] for x in imports(name, path)} & set(unknown), name


def test_import_is_light():
    code = "import sys, tq_cache; print(sorted({'tq_kernels', 'matplotlib', 'typer'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# ------------------------------------------------------------------------------------------------------------ sizes

MOST_LINES_OF_A_FILE, MOST_LINES, MOST_KERNEL_LINES, MOST_PARAMETERS = 350, 60, 90, 20


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def is_jitted(node: ast.FunctionDef) -> bool:
    return any("triton." in ast.unparse(decorator) for decorator in node.decorator_list)


def test_no_file_is_too_long():
    paths = [
        path
        for folder in ("tq_cache", "kernels", "tests", "benchmarks", "scripts")
        for path in (ROOT / folder).rglob("*.py")
    ]
    lengths = {path: len(path.read_text().splitlines()) for path in paths}
    assert not {str(path): n for path, n in lengths.items() if n > MOST_LINES_OF_A_FILE}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_function_is_too_long(package):
    for path in modules(package).values():
        for node in functions(path):
            lines, jitted = node.end_lineno - node.lineno + 1, is_jitted(node)
            parameters = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
            most = MOST_KERNEL_LINES if jitted else MOST_LINES
            assert lines <= most, f"{path.name}: {node.name} has {lines} lines"
            assert parameters <= MOST_PARAMETERS, f"{path.name}: {node.name} has {parameters} parameters"


def test_host_code_of_kernels_is_typed():
    for path in modules("tq_kernels").values():
        for node in functions(path):
            if is_jitted(node):
                continue
            arguments = [
                x for x in node.args.posonlyargs + node.args.args + node.args.kwonlyargs if x.arg not in ("self", "cls")
            ]
            assert all(x.annotation for x in arguments) and node.returns, f"{path.name}: {node.name}"


def test_the_version_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "tq_cache.version.__version__"}


def test_every_room_is_packaged():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    rooms = {name for package in PACKAGES for name, path in modules(package).items() if path.name == "__init__.py"}
    assert listed == rooms


def test_the_reference_of_the_public_api_is_current():
    made = runpy.run_path(str(ROOT / "scripts/api_reference.py"))["reference"]()
    assert (ROOT / "docs/API.md").read_text() == made, "run python scripts/api_reference.py"
