"""What the documentation says of the package is so.  `make docs` builds the site and refuses links to nowhere."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest
from transformers import LlamaConfig

import tq_cache
from tq_cache.backends.hardware import ARCHITECTURES
from tq_cache.compat import NEWEST_TESTED
from tq_cache.planning.geometry import model_geometry
from tq_cache.planning.memory import PlanSettings, cache_bytes

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TWO_SCREENS = 100


def test_readme_is_two_screens():
    assert len(README.splitlines()) <= TWO_SCREENS


def test_badges_say_what_the_package_asks_for():
    shown = re.findall(r"!\[.*?\]\((docs/badges/.*?)\)", README)
    badges = dict(re.search(r"<title>(.*): (.*)</title>", (ROOT / path).read_text()).groups() for path in shown)
    least = dict(x.split(">=") for x in PROJECT["dependencies"])
    newest = re.search(r"transformers (\d+\.\d+)", (ROOT / "ARCHITECTURES.md").read_text())[1]
    assert badges == {
        "python": PROJECT["requires-python"].removeprefix(">=") + "+",
        "torch": least["torch"] + "+",
        "transformers": f"{least['transformers']} to {newest}",
        "licence": PROJECT["license"],
    }
    assert newest == str(NEWEST_TESTED)


def test_the_reference_has_every_public_name():
    named = re.findall(r"^::: tq_cache\.(\w+)$", (ROOT / "docs/reference.md").read_text(), re.M)
    assert sorted([*named, "__version__"]) == sorted(tq_cache.__all__)


@pytest.mark.parametrize("page", ["README.md", "docs/presets.md"])
def test_bytes_in_tables_are_those_of_the_presets(page):
    rows = re.findall(r"^\| \**`(\w+)`\**(?: \(default\))? \| (\d+) \|", (ROOT / page).read_text(), re.M)
    assert {"fp8_e4m3", "tq4", "tq3", "tq2"} <= {name for name, _ in rows}
    for name, said in rows:
        assert tq_cache.PRESETS[name].token_bytes(128, 128) == int(said), name


def test_the_gpus_are_those_of_the_table():
    said = re.findall(r"^\| (\w+) \| (.+) \| (.+) \|$", (ROOT / "docs/models.md").read_text(), re.M)
    for row in ARCHITECTURES.values():
        assert (row.name, row.gpus, row.decode_path) in said, row.name


def test_the_first_figures_are_what_is_planned():
    config = LlamaConfig(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32, intermediate_size=64
    )
    geometry, settings = model_geometry(config), PlanSettings(context=131_072)
    held = [
        cache_bytes(geometry, preset and tq_cache.PRESETS[preset], settings) / 1e9 for preset in ("tq4", None, "tq3")
    ]
    text = " ".join(README.split())
    assert "takes **{:.1f} GB instead of {:.1f} GB** with `tq4`, {:.1f} GB with `tq3`".format(*held) in text


def test_links_between_pages_lead_somewhere():
    """Files only; the site's build knows the places in them, too."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "kernels/README.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_pictures_have_captions():
    """In a slanted line below, which pages show in the repository and on the site."""
    for page in [*ROOT.glob("docs/*.md"), ROOT / "kernels/README.md"]:
        text = page.read_text()
        assert len(re.findall(r"^!\[", text, re.M)) == len(re.findall(r"^!\[.*\)\n\n\*[^*]+\*\n", text, re.M)), (
            page.name
        )


def test_bytes_are_counted_in_one_unit():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*.ipynb"), ROOT / "kernels/README.md"]
    assert not [page.name for page in pages if page.name != "CHANGELOG.md" and re.search(r"\bGiB\b", page.read_text())]


def test_links_of_readme_hold_on_an_index():
    """Each is absolute there, and leads to a file of the repository if it did so before."""
    repository, shown = (
        PROJECT["urls"]["Repository"],
        runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["readme"](),
    )
    targets = re.findall(r"\]\(([^)\s]+)\)", shown)
    for target in targets:
        assert target.startswith("https://"), target
        if target.startswith(repository):
            kind, branch, path = target.removeprefix(f"{repository}/").split("#")[0].split("/", 2)
            assert (kind, branch) in [("raw", "HEAD"), ("blob", "HEAD")][: 1 if path.endswith(".svg") else 2]
            assert (ROOT / path).exists(), target
    assert sum(target.startswith(repository) for target in targets) > 20


def test_one_way_to_install():
    """From a clone, since no index has the package; what is missing for a command is named as an index has it."""
    extras = PROJECT["optional-dependencies"]
    optional = {re.split("[><=;]", name)[0] for extra in ("plot", "gguf", "eval") for name in extras[extra]}
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    packages = ("tq_cache", "tq_cli", "kernels/tq_kernels")
    sources = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    said = {path.name: re.findall(r"pip install ([^\n`;)\"]+)", path.read_text()) for path in pages + sources}
    assert said["README.md"] == ["-e ."] and said["get_started.md"][0] == "-e ."
    named = {name for lines in said.values() for line in lines for name in line.split()} - {"-e", "."}
    assert optional <= named <= optional | {"triton"}
