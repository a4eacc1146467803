"""``rapidformer preprocess``: turn a corpus into Megatron's mmap files."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rapidformer.cli.own_flags import CommandParser
from rapidformer.config.switches import to_flag
from rapidformer.errors import collecting, raise_problems
from rapidformer.nearest import find_nearest

if TYPE_CHECKING:
    from rapidformer.data.preprocess import PreprocessSettings
    from rapidformer.data.tokenizers import Tokenizer

_EXAMPLES = """\
examples:
  rapidformer preprocess --input corpus.jsonl --output-prefix corpus \\
      --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json \\
      --merge-file merges.txt --append-eod
  rapidformer preprocess --input 'books/*.jsonl.gz' --output-prefix books \\
      --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt \\
      --split-sentences
  rapidformer preprocess --input texts/ --output-prefix texts --append-eod \\
      --tokenizer-name-or-path my-model/

To resume a run that was stopped or killed, run the same command again.
"""
_WITHOUT_VALUE = "\0"
TOKENIZER = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model",
              "tokenizer_name_or_path", "vocab_size")  # fmt: skip
_NUMBERS = ("max_documents", "vocab_size", "workers", "log_interval", "partitions")
_NOT_FIELDS = ("dataset_impl", "partitions", "part_megabytes", "help")
# By group: a flag (with another name for it), its value (none: a switch) and its meaning.
_FLAGS: dict[str, list[tuple[str, str, str]]] = {
    "input": [
        ("--input", "FILE ...", "files, patterns and folders: JSON lines, plain text or Parquet, "
         "also compressed with gzip or zstd"),
        ("--json-keys", "KEY ...", "fields to read from each JSON object or table row, each "
         "written to separate files (default: text)"),
        ("--text-documents", "HOW", "what counts as a document in a plain text file: the whole "
         "file, each line, or each block between blank lines (file|lines|blank-line, default: "
         "file)"),
        ("--max-documents", "N", "only the first N lines (rows, files) of the input"),
        ("--strict", "", "stop at the first bad line, instead of counting and reporting bad lines"),
    ],
    "tokenizer": [
        ("--tokenizer-type", "TYPE", "BertWordPieceLowerCase, BertWordPieceCase, GPT2BPETokenizer, "
         "SentencePieceTokenizer, GPTSentencePieceTokenizer, NullTokenizer or "
         "HuggingFaceTokenizer"),
        ("--vocab-file --vocab", "FILE", "BERT's vocab.txt or GPT-2's vocab.json"),
        ("--merge-file", "FILE", "GPT-2's merges.txt"),
        ("--tokenizer-model", "FILE", "a SentencePiece model"),
        ("--tokenizer-name-or-path", "NAME", "a folder with a Hugging Face tokenizer, or its name "
         "on the Hub"),
        ("--vocab-size", "N", "for NullTokenizer, whose texts are already token ids"),
        ("--append-eod", "", "end each document with the end-of-document token"),
        ("--split-sentences", "", "one sequence per sentence, as BERT needs"),
        ("--keep-newlines", "", "keep the whitespace after each sentence"),
        ("--lang", "LANGUAGE", "language of the sentences; only english has rules for "
         "abbreviations (default: english)"),
    ],
    "output": [
        ("--output-prefix", "PREFIX", "prefix of the file names; `_KEY_document` or "
         "`_KEY_sentence` is appended"),
        ("--dataset-impl", "mmap", "format of the files; only mmap can be written"),
        ("--overwrite", "", "replace existing files"),
    ],
    "run": [
        ("--workers", "N", "processes that tokenize, one core each (default: all available cores)"),
        ("--log-interval", "N", "documents between progress lines, if there is no terminal for a "
         "progress bar (default: 1000)"),
        ("--part-megabytes", "X", "size of a part of the input, which is what each worker repeats "
         "after a kill (default: 1 to 32, depending on the input)"),
        ("--partitions", "N", "ignored: the input is split automatically"),
        ("-h --help", "", "show this page"),
    ],
}  # fmt: skip


class _Help(argparse.RawDescriptionHelpFormatter):
    """Show a value as `FILE`: argparse sees it as optional, so that we can report it ourselves."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size((100, 24)).columns, 110)
        super().__init__(prog, max_help_position=34, width=width)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        metavar = str(action.metavar or default_metavar)
        return f"{metavar} ..." if action.nargs == "*" else metavar


def run(argv: list[str]) -> None:
    """Preprocess, and print a summary to standard output."""
    parser = _build_parser()
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(parser.format_help())
        return
    texts, problems = _parse(parser, argv)
    values = _convert(texts, problems)
    settings, tokenizer = _build(values, problems)
    from rapidformer.data.preprocess import format_summary, preprocess
    from rapidformer.log import configure_logging, warn_once

    configure_logging()
    if "partitions" in values:
        warn_once("--partitions has no effect: the input is split automatically.")
    sys.stdout.write(format_summary(preprocess(settings, tokenizer)))


def _build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="rapidformer preprocess",
        usage="rapidformer preprocess --input FILE ... --output-prefix PREFIX [flags]",
        description="Turn a corpus into the .bin/.idx files that pre-training reads.",
        epilog=_EXAMPLES, formatter_class=_Help, allow_abbrev=False,
        argument_default=argparse.SUPPRESS, add_help=False,
    )  # fmt: skip
    for title, flags in _FLAGS.items():
        group = parser.add_argument_group(title)
        for names, value, text in flags:
            options: dict[str, Any] = {"action": "store_true"}
            if value.endswith(" ..."):
                options = {"nargs": "*", "action": "extend", "metavar": value[:-4]}
            elif value:
                options = {"nargs": "?", "const": _WITHOUT_VALUE, "metavar": value}
            group.add_argument(*names.split(), **options, help=text)
    return parser


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The given values, and what is wrong with the flags themselves."""
    known = parser._option_string_actions
    namespace, unknown = parser.parse_known_args(argv)
    texts = vars(namespace)
    problems = [_describe_unknown(word, known) for word in unknown if word.startswith("-")]
    if unknown and not problems:
        problems.append(
            f"unexpected {' '.join(unknown)!r}: every value needs a --flag in front of it."
        )
    for name, value in texts.items():
        if value == _WITHOUT_VALUE or value == []:
            problems.append(f"{to_flag(name)} needs a value.")
    return texts, problems


def _describe_unknown(word: str, known: Mapping[str, Any]) -> str:
    name = word.partition("=")[0]
    near = find_nearest(name, known)
    hint = f"did you mean {near}?" if near else "`rapidformer preprocess --help` lists all flags."
    return f"unknown flag {name}: {hint}"


def _convert(texts: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The values; not by argparse, so that all problems are reported at once."""
    values = {name: value for name, value in texts.items() if value not in (_WITHOUT_VALUE, [])}
    kinds: dict[str, tuple[Callable[[str], Any], str]] = {
        **dict.fromkeys(_NUMBERS, (int, "a whole number")),
        "part_megabytes": (_read_size, "a positive number"),
    }
    for name, (convert, what) in kinds.items():
        if name in values:
            try:
                values[name] = convert(values[name])
            except ValueError:
                problems.append(f"{to_flag(name)} {values.pop(name)} is not {what}.")
    kind = values.get("dataset_impl", "mmap")
    if kind in ("lazy", "cached"):
        problems.append(
            f"--dataset-impl {kind} is an older format, which is read but not written: its tokens "
            "always take 4 bytes. Use mmap; the samples are the same."
        )
    elif kind != "mmap":
        problems.append(f"--dataset-impl {kind} is unknown: use mmap.")
    return values


def _read_size(text: str) -> float:
    size = float(text)
    if not 0 < size < math.inf:
        raise ValueError
    return size


def _build(values: dict[str, Any], problems: list[str]) -> tuple[PreprocessSettings, Tokenizer]:
    """The settings and the tokenizer; reports all problems together."""
    from rapidformer.data.preprocess import PreprocessSettings
    from rapidformer.data.preprocess.settings import find_problems
    from rapidformer.data.tokenizers import build_tokenizer

    rest = {name: value for name, value in values.items() if name not in _NOT_FIELDS}
    settings = PreprocessSettings(
        inputs=tuple(rest.pop("input", ())),
        output_prefix=rest.pop("output_prefix", ""),
        json_keys=tuple(rest.pop("json_keys", ("text",))),
        part_bytes=None if "part_megabytes" not in values else int(values["part_megabytes"] * 1e6),
        **{name: value for name, value in rest.items() if name not in TOKENIZER},
    )
    with collecting(problems):
        tokenizer = build_tokenizer(**{name: rest[name] for name in TOKENIZER if name in rest})
    reported = {problem.split()[0] for problem in problems}  # a flag without its value
    for problem in find_problems(settings):
        if " is missing:" not in problem or problem.split()[0] not in reported:
            problems.append(problem)
    raise_problems(problems)
    return settings, tokenizer
