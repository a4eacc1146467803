"""Any tokenizer that transformers can load, from a local folder or the Hub.

No special token ([CLS], <s>, ...) is added to a text, although transformers would: the sample
builders and --append-eod add them. A fast tokenizer is passed to `tokenizers` directly, so that a
worker need not import transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rapidformer.data.tokenizers.base import Tokenizer, hash_parts
from rapidformer.data.tokenizers.rust import RustTokenizer
from rapidformer.errors import DataError
from rapidformer.hub import (
    describe_absence,
    describe_content,
    has_tokenizer,
    is_hub_reachable,
    looks_like_path,
    quiet_transformers,
    suggest_path,
)

_SENTINEL = re.compile(r"<extra_id_(\d+)>")


def load_hugging_face(location: str, *, vocab_extra_ids: int = 0) -> Tokenizer:
    """The tokenizer of a model folder or Hub name."""
    path = Path(location).expanduser()
    _check_location(location, path)
    from transformers import AutoTokenizer

    is_local = path.exists()
    try:
        with quiet_transformers(str(path)):
            loaded: Any = AutoTokenizer.from_pretrained(
                str(path) if is_local else location,
                local_files_only=is_local or not is_hub_reachable(),
                trust_remote_code=False,
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError) as error:
        raise DataError(_describe_failure(location, is_local, error)) from error
    return adopt_hugging_face(loaded, vocab_extra_ids=vocab_extra_ids)


def adopt_hugging_face(loaded: Any, *, vocab_extra_ids: int = 0) -> Tokenizer:
    """A transformers tokenizer behind our interface."""
    vocab = dict(loaded.get_vocab())
    special = {
        key: getattr(loaded, f"{key}_token_id", None)
        for key in ("cls", "sep", "pad", "mask", "bos", "eos")
    }
    special["eod"] = special["eos"]
    has = sum(1 for token in vocab if _SENTINEL.fullmatch(token))
    extra = max(vocab_extra_ids, has)
    if getattr(loaded, "is_fast", False):
        from tokenizers import Tokenizer as Backend

        # A copy: what we turn off must stay on in the user's own object.
        backend = Backend.from_str(loaded.backend_tokenizer.to_str())
        return RustTokenizer("HuggingFaceTokenizer", backend, vocab, special, extra)
    return PythonTokenizer(loaded, vocab, special, extra)


class PythonTokenizer(Tokenizer):
    """A tokenizer that transformers runs in Python: correct, but slow."""

    def __init__(
        self, loaded: Any, vocab: dict[str, int], special: Mapping[str, int | None], extra_ids: int
    ) -> None:
        super().__init__("HuggingFaceTokenizer", vocab, special, extra_ids)
        self._loaded = loaded

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        encoded = self._loaded(
            texts, add_special_tokens=False, truncation=False, padding=False, verbose=False
        )
        return encoded["input_ids"]

    def detokenize(self, ids: Sequence[int]) -> str:
        self._get_tokens(ids)
        return str(self._loaded.decode([int(i) for i in ids]))

    @property
    def fingerprint(self) -> str:
        return hash_parts([repr(self._loaded), super().fingerprint])


def _check_location(location: str, path: Path) -> None:
    flag = f"--tokenizer-name-or-path {location}"
    if path.is_file():
        raise DataError(f"{flag} is a file: give the folder that contains it.")
    if path.is_dir() and not has_tokenizer(path):
        raise DataError(
            f"{flag} lacks a tokenizer (tokenizer.json or vocab.txt): it holds "
            f"{describe_content(path)}."
        )
    if not path.exists() and looks_like_path(location):
        raise DataError(f"{flag}: no such folder.{suggest_path(path)}")


def _describe_failure(location: str, is_local: bool, error: Exception) -> str:
    if not is_local and isinstance(error, OSError):
        flag, is_reachable = "--tokenizer-name-or-path", is_hub_reachable()
        return describe_absence(f"tokenizer {location}", location, flag, is_reachable=is_reachable)
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return (
            f"The tokenizer of {location} comes with its own Python code, which is not run here. "
            "If it is a fast one, tokenizer.backend_tokenizer.save('FOLDER/tokenizer.json') makes "
            "one without code, for --tokenizer-name-or-path FOLDER."
        )
    return f"The tokenizer of {location} cannot be loaded: {text[:300]}"
