"""What a model that sees or hears has next to its tokenizer: how images and sound are prepared.

These files are kept as they are. To load a processor would need packages that text does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer.config import Settings
from rapidformer.models.adapter_folder import find_files
from rapidformer.models.location import explain_failure, get_hub_options, get_model_location

_NAMES = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class TokenizerWithFiles:
    """A tokenizer that is saved together with the files of its model's processor."""

    tokenizer: Any
    files: dict[str, bytes]

    def save_pretrained(self, folder: str | Path) -> None:
        self.tokenizer.save_pretrained(folder)
        for name, content in self.files.items():
            (Path(folder) / name).write_bytes(content)


def keep_processor_files(tokenizer: Any, args: Settings) -> TokenizerWithFiles:
    """The tokenizer, with the files as they are now: the model's folder may change in a run."""
    files: dict[str, bytes] = {}
    location = find_files(get_model_location(args), "config.json")
    for name in _NAMES if location is not None else ():
        path = _find_file(location, name, args)
        if path is not None:
            files[name] = path.read_bytes()
    return TokenizerWithFiles(tokenizer, files)


def _find_file(location: str, name: str, args: Settings) -> Path | None:
    """A file of a model, downloaded from the Hub if that is where the model is."""
    from transformers.utils import cached_file

    options = {k: v for k, v in get_hub_options(location, args).items() if k != "trust_remote_code"}
    with explain_failure(location, "processor"):
        found = cached_file(
            location, name, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False, **options,
        )  # fmt: skip
    return None if found is None else Path(found)
