"""The site's pages: a hook of mkdocs (`mkdocs.yml`).

Pages lie in the site as they do in the repository, those outside of `docs` among them, so that a link between two of
them holds on both. The link to the repository itself is the one that `pyproject.toml` names.
"""

import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

EXAMPLES = "examples/README.md"
PAGES = ("*.md", "docs/*.md", "docs/*/*.svg", "kernels/README.md", EXAMPLES)
# What pages show or link to.
FILES = ("benchmarks/results/*.png", "examples/*.py", "examples/*.txt", "pyproject.toml", "CITATION.cff", "LICENSE")
STYLE = ("scripts/documentation/site.css",)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The repository's address, from the one place that has it."""
    project = tomllib.loads((Path(config.config_file_path).parent / "pyproject.toml").read_text())["project"]
    config.repo_url, config.repo_name = project["urls"]["Repository"], project["name"]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """In place of what mkdocs has found in `docs`, everything that is listed here, named from the repository's root."""
    root = Path(config.config_file_path).parent
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in sorted(path for pattern in PAGES + FILES + STYLE for path in root.glob(pattern)):
        name = path.relative_to(root).as_posix()
        files.append(File(name, str(root), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Below the list of examples, which in the repository are a click away, the code of each."""
    if page.file.src_uri != EXAMPLES:
        return markdown
    folder = Path(config.config_file_path).parent / "examples"
    names = re.findall(r"\((\w+)\.py\)", markdown)
    return markdown + "".join(
        f"\n## {name}\n\n```python\n{(folder / name).with_suffix('.py').read_text()}```\n" for name in names
    )
