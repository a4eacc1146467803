"""The settings of a preprocessing run, and where its files are.

Only what is in `describe_result` decides the output bytes. The number of workers does not, so a run
may resume with another one.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT_DOCUMENTS = ("file", "lines", "blank-line")
# English has a list of abbreviations; other languages share the rules that need none.
LANGUAGES = (
    "english", "arabic", "chinese", "czech", "danish", "dutch", "estonian", "finnish", "french",
    "german", "greek", "hindi", "italian", "japanese", "korean", "malayalam", "norwegian",
    "polish", "portuguese", "russian", "slovene", "spanish", "swedish", "turkish", "ukrainian",
)  # fmt: skip
_MEBIBYTE = 1 << 20
_LARGEST_PART = 32 * _MEBIBYTE


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """One run; the tokenizer is passed separately."""

    inputs: tuple[str, ...]
    output_prefix: str
    json_keys: tuple[str, ...] = ("text",)
    split_sentences: bool = False
    keep_newlines: bool = False
    lang: str = "english"
    append_eod: bool = False
    text_documents: str = "file"
    max_documents: int | None = None
    workers: int | None = None
    log_interval: int = 1000
    strict: bool = False
    overwrite: bool = False
    part_bytes: int | None = None

    @property
    def level(self) -> str:
        return "sentence" if self.split_sentences else "document"

    def get_target(self, key: str) -> Path:
        """The prefix of the files that hold one key's tokens."""
        return Path(f"{Path(self.output_prefix).expanduser()}_{key}_{self.level}")

    def get_targets(self) -> dict[str, Path]:
        return {key: self.get_target(key) for key in self.json_keys}

    def get_work_folder(self) -> Path:
        """Where finished parts wait for the others."""
        return Path(f"{self.get_target('-'.join(self.json_keys))}.parts")

    def get_part_bytes(self, total_bytes: int) -> int:
        """How much text a part holds: enough parts for many cores, few enough for a folder."""
        if self.part_bytes is not None:
            return self.part_bytes
        return min(max(total_bytes // 256, _MEBIBYTE), _LARGEST_PART)

    def describe_result(self) -> dict[str, Any]:
        """Everything that decides the bytes of the result, besides input and tokenizer."""
        return {
            "json_keys": list(self.json_keys),
            "split_sentences": self.split_sentences,
            "keep_newlines": self.split_sentences and self.keep_newlines,
            "lang": self.lang if self.split_sentences else "",
            "append_eod": self.append_eod,
            "text_documents": self.text_documents,
            "max_documents": self.max_documents,
        }


def find_setting_problems(settings: PreprocessSettings) -> list[str]:
    """All problems with the values."""
    problems: list[str] = []
    if not settings.json_keys:
        problems.append("--json-keys names no key: leave it out for `text`, or name at least one.")
    twice = sorted({key for key in settings.json_keys if settings.json_keys.count(key) > 1})
    problems += [f"--json-keys names {key} twice." for key in twice]
    problems += [
        f"--json-keys {key}: the key becomes a part of the file name, so it may have no slash."
        for key in settings.json_keys
        if "/" in key or os.sep in key
    ]
    problems += _find_choice_problems("--lang", settings.lang, LANGUAGES)
    problems += _find_choice_problems("--text-documents", settings.text_documents, TEXT_DOCUMENTS)
    for flag, value in (
        ("--workers", settings.workers),
        ("--log-interval", settings.log_interval),
        ("--max-documents", settings.max_documents),
        ("--part-megabytes", settings.part_bytes),
    ):
        if value is not None and value < 1:
            problems.append(f"{flag} must be positive.")
    prefix = Path(settings.output_prefix).expanduser()
    if not settings.output_prefix:
        problems.append(
            "--output-prefix is missing: it is where the output files go, such as data/corpus."
        )
    elif settings.output_prefix.endswith(("/", os.sep)) or prefix.is_dir():
        problems.append(
            f"--output-prefix {settings.output_prefix} is a folder: add the beginning of the "
            f"files' names, such as {prefix / 'corpus'}."
        )
    return problems


def get_usable_cores() -> int:
    """The number of cores this process may use, possibly fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _find_choice_problems(flag: str, value: str, choices: tuple[str, ...]) -> list[str]:
    if value in choices:
        return []
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]}?" if near else ""
    return [f"{flag} {value} is unknown: use one of {', '.join(choices)}.{hint}"]
