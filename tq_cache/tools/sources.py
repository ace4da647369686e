"""What a MODEL on the command line can be: a folder, a config.json, a GGUF file, an id on the Hugging Face Hub."""

import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, PreTrainedConfig

from ..planning.geometry import load_config

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
FORMS = "a model folder, a config.json, a GGUF file or an id on the Hugging Face Hub"
GGUF_EXTRA = "pip install gguf accelerate"


@dataclass(frozen=True)
class Source:
    """A model that was named, and what `from_pretrained` takes for it.

    name:    as given
    path:    the folder, the config.json, or the id
    options: of `from_pretrained`
    """

    name: str
    path: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def gguf(self) -> bool:
        """Whether it is a GGUF file, whose weights transformers dequantises."""
        return "gguf_file" in self.options

    @property
    def folder(self) -> str:
        """The folder or the id with the weights: of a config.json, those beside it."""
        return str(Path(self.path).parent) if Path(self.path).is_file() else self.path

    def config(self) -> PreTrainedConfig:
        """Its config; of a model on the Hub nothing else is downloaded.

        Raises ValueError where there is none that transformers can read.
        """
        if self.options.get("local_files_only") and not self.gguf:
            return load_config(self.path)
        try:
            return AutoConfig.from_pretrained(self.path, trust_remote_code=False, **self.options)
        except Exception as error:  # of any class, as in `load_config`
            raise ValueError(
                f"expected a config that transformers can read in {self.name!r}, got {type(error).__name__}: {error}"
            ) from error

    def stored_weights(self) -> int | None:
        """Bytes of the checkpoint's safetensors, from their index or the one file's size; None where there are none."""
        if self.gguf:
            return None
        try:
            if "local_files_only" not in self.options:
                try:
                    return _total_size(hf_hub_download(self.path, INDEX))
                except EntryNotFoundError:
                    return get_hf_file_metadata(hf_hub_url(self.path, SINGLE)).size
            index, single = Path(self.folder) / INDEX, Path(self.folder) / SINGLE
            return _total_size(index) if index.is_file() else single.stat().st_size
        except (EntryNotFoundError, HfHubHTTPError, OSError):
            return None


def _total_size(index: str | Path) -> int | None:
    return json.loads(Path(index).read_text()).get("metadata", {}).get("total_size")


def find_source(model: str | Path) -> Source:
    """The model of that name: a path if there is something at it, else an id on the Hub.

    Raises ValueError where there is neither, or the Hub cannot be asked, or packages that read a GGUF file are missing.
    """
    path = Path(model)
    if path.suffix == ".gguf":
        return _gguf(path)
    if path.exists():
        return Source(str(model), str(path), {"local_files_only": True})
    try:
        validate_repo_id(str(model))
    except HFValidationError:
        raise ValueError(f"expected {FORMS}, got {str(model)!r}, where there is none") from None
    _check_hub(str(model))
    return Source(str(model), str(model))


def _gguf(path: Path) -> Source:
    if not path.is_file():
        raise ValueError(f"expected a GGUF file, got {str(path)!r}, where there is none")
    for package in ("gguf", "accelerate"):  # transformers reads GGUF files with these
        if find_spec(package) is None:
            raise ValueError(f"expected the package {package} to read {path.name}, found none; {GGUF_EXTRA}")
    return Source(str(path), str(path.parent), {"gguf_file": path.name, "local_files_only": True})


def _check_hub(model: str) -> None:
    """Raise ValueError, with what to do, unless the config of this id is in the cache or can be had from the Hub.

    `from_pretrained` would try for half a minute, and say less.
    """
    if isinstance(try_to_load_from_cache(model, CONFIG), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(model, CONFIG))
        return
    except EntryNotFoundError:
        found = f"is on the Hub without a {CONFIG}"
        advice = "name a repository with one; a GGUF file in it has to be downloaded and named itself"
    except HfHubHTTPError as error:  # unknown, private or gated: the Hub does not tell the first two apart
        found = f"is no path here, and for which the Hub answers {error.response.status_code}"
        advice = "check the name; of a private or gated model accept its terms and run `hf auth login`"
    except Exception as error:  # of httpx, or of its successor: no network, no certificate, offline mode
        found = f"is no path here and not in the Hub's cache, and the Hub cannot be reached ({type(error).__name__})"
        advice = f"check the name and the network, or run `hf download {model}` where there is one and name the folder"
    raise ValueError(f"expected {FORMS}, got {model!r}, which {found}; {advice}")
