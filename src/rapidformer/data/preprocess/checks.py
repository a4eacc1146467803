"""Checks before a run starts, so that all problems are reported at once."""

from __future__ import annotations

from pathlib import Path

from rapidformer.data.preprocess.inputs import Source, find_sources
from rapidformer.data.preprocess.settings import PreprocessSettings, find_setting_problems
from rapidformer.data.tokenizers import Tokenizer
from rapidformer.errors import ConfigurationError
from rapidformer.log import warn_once


def find_problems(settings: PreprocessSettings) -> list[str]:
    """All problems with the settings and the input."""
    return _look(settings)[0]


def check_run(settings: PreprocessSettings, tokenizer: Tokenizer) -> list[Source]:
    """The input files of a valid run."""
    problems, sources = _look(settings)
    if settings.append_eod and not tokenizer.has_special("eod"):
        problems.append(
            f"--append-eod: the tokenizer {tokenizer.name} has no token that ends a document; "
            "leave it out, or choose a tokenizer that has one."
        )
    if problems:
        raise ConfigurationError(problems)
    _warn(settings, tokenizer)
    return sources


def check_output_is_free(settings: PreprocessSettings) -> None:
    """Refuse to overwrite files."""
    there = [
        path
        for target in settings.get_targets().values()
        for path in (Path(f"{target}.bin"), Path(f"{target}.idx"))
        if path.exists()
    ]
    if there:
        raise ConfigurationError(
            f"{' and '.join(map(str, there))} {'exists' if len(there) == 1 else 'exist'} already: "
            "add --overwrite, or choose another --output-prefix."
        )


def _look(settings: PreprocessSettings) -> tuple[list[str], list[Source]]:
    problems = find_setting_problems(settings)
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


def _warn(settings: PreprocessSettings, tokenizer: Tokenizer) -> None:
    if settings.split_sentences:
        return
    if settings.keep_newlines:
        warn_once("--keep-newlines has no effect without --split-sentences.")
    if settings.lang != "english":
        warn_once("--lang has no effect without --split-sentences.")
    if tokenizer.name.startswith("BertWordPiece"):
        warn_once(
            "--split-sentences is missing: BERT's samples are made of sentences, and each document "
            "will be one."
        )
