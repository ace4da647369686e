"""What an index shows: README with absolute links, since nothing of the repository lies beside it there.

All else about the package is in `pyproject.toml`, the repository's address among it.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def readme() -> str:
    """README, whose pictures and links to files of the repository lead to its address."""
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{repository}/raw/HEAD/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1{repository}/blob/HEAD/", text)


if __name__ == "__main__":
    setup(long_description=readme(), long_description_content_type="text/markdown")
