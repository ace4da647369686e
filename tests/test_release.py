"""What is given away: sdist and wheel, built from this tree and installed where nothing of it is.

Needs a package index, for build, twine and Hugging Face's kernels; torch and all else that `tq_cache` depends on are
lent by links to what runs the tests.
"""

import os
import runpy
import subprocess
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import tq_cache

ROOT = Path(__file__).parent.parent
PACKAGES = {"tq_cache": ROOT / "tq_cache", "tq_cli": ROOT / "tq_cli", "tq_kernels": ROOT / "kernels/tq_kernels"}


def call(*command: object, cwd: Path | None = None) -> str:
    """Standard output of a command that is shown no other modules; what it said if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([str(x) for x in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"
    return run.stdout


@pytest.fixture
def tools(tmp_path_factory) -> Path:
    """The interpreter of an environment with build and twine."""
    folder = tmp_path_factory.mktemp("tools")
    venv.create(folder, with_pip=True)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    call(folder / "bin/python", "-m", "pip", "install", "-q", *extras["release"])
    return folder / "bin/python"


@pytest.fixture
def dist(tools, tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    call(tools, "-m", "build", "--outdir", folder, ROOT)
    return folder


@pytest.fixture
def fresh(tools, dist, tmp_path_factory) -> Path:
    """The interpreter of an environment with the wheel, its dependencies, Hugging Face's kernels, and no repository."""
    folder, lent = tmp_path_factory.mktemp("fresh"), tmp_path_factory.mktemp("lent")
    venv.create(folder, with_pip=False)
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not any(name in entry.name for name in ("tq_cache", "kernels")) and entry.suffix != ".pth":
            (lent / entry.name).symlink_to(entry)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(f"{lent}\n")
    (wheel,) = dist.glob("*.whl")
    call(tools, "-m", "pip", "--python", folder / "bin/python", "install", "-q", wheel, "kernels")
    return folder / "bin/python"


@pytest.mark.slow
def test_a_release(tools, dist, fresh, tmp_path):
    """One test, for it is built once, in this tree, whatever number of processes runs the tests."""
    check_fit_for_an_index(tools, dist)
    check_what_an_index_shows(dist)
    check_what_the_wheel_holds(dist)
    check_what_the_sdist_holds(dist)
    check_an_import(fresh, tmp_path)
    check_the_demo(fresh, tmp_path)


def check_fit_for_an_index(tools: Path, dist: Path) -> None:
    assert len(list(dist.iterdir())) == 2
    call(tools, "-m", "twine", "check", "--strict", *dist.iterdir())


def check_what_an_index_shows(dist: Path) -> None:
    """README with links that hold there, and what `pyproject.toml` says."""
    (path,) = dist.glob("*.whl")
    name = f"tq_cache-{tq_cache.__version__}.dist-info/METADATA"
    said = message_from_bytes(zipfile.ZipFile(path).read(name))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert said.get_payload().strip() == runpy.run_path(str(ROOT / "setup.py"))["readme"]().strip()
    assert said["Description-Content-Type"] == "text/markdown" and said["Author"] == project["authors"][0]["name"]
    assert said.get_all("Project-URL") == [f"{name}, {url}" for name, url in project["urls"].items()]
    assert said.get_all("Classifier") == project["classifiers"] and said["Keywords"].split(",") == project["keywords"]


def check_what_the_wheel_holds(dist: Path) -> None:
    """The three packages and nothing else, in less than 7 MB."""
    (path,) = dist.glob("*.whl")
    assert path.stat().st_size < 7e6
    names = zipfile.ZipFile(path).namelist()
    held = {name for name in names if not name.startswith(f"tq_cache-{tq_cache.__version__}.dist-info/")}
    expected = {f"{name}/{x.relative_to(base)}" for name, base in PACKAGES.items() for x in base.rglob("*.py")}
    expected |= {f"{name}/py.typed" for name in PACKAGES}
    for data in ("embedded", "harness_tasks"):
        files = (x for x in (ROOT / "tq_cache/tools" / data).iterdir() if x.is_file())
        expected |= {str(x.relative_to(ROOT)) for x in files}
    assert held == expected


def check_what_the_sdist_holds(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    top = f"tq_cache-{tq_cache.__version__}"
    names = set(tarfile.open(path).getnames())
    assert {f"{top}/{x}" for x in ("LICENSE", "README.md", "pyproject.toml", "kernels/tq_kernels/launch.py")} <= names


def check_an_import(fresh: Path, tmp_path: Path) -> None:
    code = """
import importlib.metadata, sys, kernels, transformers, tq_cache, tq_kernels
assert callable(kernels.get_kernel)
for module in (tq_cache, tq_kernels, kernels):
    assert module.__file__.startswith(sys.prefix), module.__file__
assert tq_cache.__version__ == importlib.metadata.version("tq-cache")
top = {str(x).split("/")[0] for x in importlib.metadata.files("tq-cache") if str(x).endswith(".py")}
assert top == {"tq_cache", "tq_cli", "tq_kernels"}, top
"""
    call(fresh, "-I", "-c", code, cwd=tmp_path)


def check_the_demo(fresh: Path, tmp_path: Path) -> None:
    shown = call(fresh, "-I", "-m", "tq_cache", "demo", "--presets", "tq4", cwd=tmp_path)
    assert all(f"│ {cache} " in shown for cache in ("DynamicCache", "tq4"))
    assert tq_cache.__version__ in call(fresh.parent / "tq-cache", "info", cwd=tmp_path)
