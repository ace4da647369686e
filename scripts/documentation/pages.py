"""The site's pages: a hook of mkdocs (`mkdocs.yml`).

Pages lie in the site as they do in the repository, those outside of `docs` among them, so that a link between two of
them holds on both.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = ("*.md", "docs/*.md", "docs/*/*.svg", "kernels/README.md")
FILES = ("benchmarks/results/*.png", "pyproject.toml", "CITATION.cff", "LICENSE")  # what pages show or link to


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """In place of what mkdocs has found in `docs`, everything that is listed here, named from the repository's root."""
    root = Path(config.config_file_path).parent
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in sorted(path for pattern in PAGES + FILES for path in root.glob(pattern)):
        name = path.relative_to(root).as_posix()
        files.append(File(name, str(root), config.site_dir, config.use_directory_urls))
    return files
