"""The settings of a preprocessing run, where its files are, and what is checked before it starts.

Only what is in `describe_result` decides the output bytes. The number of workers does not, so a run
may resume with another one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer.data.preprocess.inputs import Source, find_sources
from rapidformer.data.tokenizers import Tokenizer
from rapidformer.errors import ConfigurationError
from rapidformer.log import warn_once
from rapidformer.nearest import find_nearest

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

    def get_targets(self) -> dict[str, Path]:
        """The prefixes of the files that hold the tokens of each key."""
        return {key: self._name_file(key) for key in self.json_keys}

    def get_work_folder(self) -> Path:
        """Where finished parts wait for the others."""
        return self._name_file("-".join(self.json_keys), ".parts")

    def _name_file(self, key: str, ending: str = "") -> Path:
        level = "sentence" if self.split_sentences else "document"
        return Path(f"{Path(self.output_prefix).expanduser()}_{key}_{level}{ending}")

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


def check_run(settings: PreprocessSettings, tokenizer: Tokenizer) -> list[Source]:
    """The input files of a valid run."""
    problems, sources = _check_inputs(settings)
    if settings.append_eod and not tokenizer.has_special("eod"):
        problems.append(
            f"--append-eod: the tokenizer {tokenizer.name} has no token that ends a document; "
            "leave it out, or choose a tokenizer that has one."
        )
    if problems:
        raise ConfigurationError(problems)
    if not settings.split_sentences:
        if settings.keep_newlines:
            warn_once("--keep-newlines has no effect without --split-sentences.")
        if settings.lang != "english":
            warn_once("--lang has no effect without --split-sentences.")
        if tokenizer.name.startswith("BertWordPiece"):
            warn_once(
                "--split-sentences is missing: BERT's samples are made of sentences, and each "
                "document will be one."
            )
    return sources


def check_output_is_free(settings: PreprocessSettings) -> None:
    files = [
        Path(f"{target}{ending}")
        for target in settings.get_targets().values()
        for ending in (".bin", ".idx")
    ]
    there = [str(path) for path in files if path.exists()]
    if there:
        raise ConfigurationError(
            f"{' and '.join(there)} {'exists' if len(there) == 1 else 'exist'} already: "
            "add --overwrite, or choose another --output-prefix."
        )


def find_problems(settings: PreprocessSettings) -> list[str]:
    """All problems with the settings and the input."""
    return _check_inputs(settings)[0]


def _check_inputs(settings: PreprocessSettings) -> tuple[list[str], list[Source]]:
    problems = _find_setting_problems(settings)
    sources: list[Source] = []
    try:
        sources = find_sources(settings.inputs)
    except ConfigurationError as error:
        problems += error.problems
    texts = [source.path for source in sources if source.kind == "text"]
    if texts and len(settings.json_keys) > 1:
        problems.append(
            f"--json-keys names {len(settings.json_keys)} keys, but {texts[0]} is plain text, "
            "which has one."
        )
    return problems, sources


def _find_setting_problems(settings: PreprocessSettings) -> list[str]:
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
    for flag, choice, choices in (
        ("--lang", settings.lang, LANGUAGES),
        ("--text-documents", settings.text_documents, TEXT_DOCUMENTS),
    ):
        if choice not in choices:
            near = find_nearest(choice, choices)
            hint = f" Did you mean {near}?" if near else ""
            problems.append(f"{flag} {choice} is unknown: use one of {', '.join(choices)}.{hint}")
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
