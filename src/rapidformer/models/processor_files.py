"""What a model that sees or hears has next to its tokenizer: how images and sound are prepared.

These files are kept as they are. To load a processor would need packages that text does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer.config import Settings
from rapidformer.config.task_sections import ModelArguments
from rapidformer.hub import is_hub_reachable
from rapidformer.models.adapter_folder import find_files
from rapidformer.models.location import explain_failure, get_model_location

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


@contextmanager
def without_last_call(processor: Any) -> Iterator[None]:
    """Inside, a tokenizer neither cuts nor pads: its file would say how it was called last."""
    backend: Any = getattr(getattr(processor, "tokenizer", processor), "backend_tokenizer", None)
    truncation, padding = getattr(backend, "truncation", None), getattr(backend, "padding", None)
    if truncation is not None:
        backend.no_truncation()
    if padding is not None:
        backend.no_padding()
    try:
        yield
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def keep_processor_files(tokenizer: Any, args: Settings) -> TokenizerWithFiles:
    """The tokenizer, with the files as they are now: the model's folder may change in a run."""
    location = find_files(get_model_location(args), "config.json")
    folder = None if location is None else _find_folder(location, args)
    paths = [] if folder is None else [folder / name for name in _NAMES]
    files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    return TokenizerWithFiles(tokenizer, files)


def _find_folder(location: str, args: ModelArguments) -> Path:
    """The folder with the files, downloaded from the Hub if that is where the model is."""
    if Path(location).is_dir():
        return Path(location)
    from huggingface_hub import snapshot_download

    with explain_failure(location, "processor"):
        found = snapshot_download(
            location, cache_dir=args.cache_dir, local_files_only=not is_hub_reachable(),
            allow_patterns=list(_NAMES),
        )  # fmt: skip
    return Path(found)
