"""``rapidformer data``: look at a run's data; inspect and merge Megatron's ``.bin/.idx`` files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.cli.own_flags import CommandParser
from rapidformer.cli.preprocess import TOKENIZER
from rapidformer.errors import DataError, raise_problems
from rapidformer.errors import count as counted

if TYPE_CHECKING:
    from rapidformer.data.indexed import IndexedDataset
    from rapidformer.data.tokenizers import Tokenizer

_EXAMPLES = """\
examples:
  rapidformer data show --load runs/chat
  rapidformer data info corpus_text_document
  rapidformer data head corpus_text_document -n 2 --tokenizer-name-or-path gpt2
  rapidformer data merge --input part_0 part_1 --output-prefix corpus
  rapidformer data merge --input parts/ --output-prefix corpus

A PREFIX is the name of a pair of files without .bin and .idx.
"""


def run(argv: list[str]) -> None:
    if argv[:1] == ["show"]:
        # Apart, since it takes the flags of a run.
        from rapidformer.cli.data_show import run as show

        show(argv[1:])
        return
    options = _build_parser().parse_args(argv)
    options.function(options)


def _build_parser() -> CommandParser:
    parser = CommandParser(
        prog="rapidformer data",
        description="Show a run's data; inspect Megatron's .bin/.idx files and merge them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="show|info|head|merge", dest="command", required=True)
    commands.add_parser("show", help="the first rows of a run's data, and what is trained on")
    info = commands.add_parser("info", help="counts, types, lengths, and any damage")
    info.add_argument("prefixes", nargs="+", metavar="PREFIX")
    info.add("--json", "", "one JSON object per line and PREFIX")
    info.set_defaults(function=_info)
    head = commands.add_parser("head", help="the first documents, as text or as ids")
    head.add_argument("prefix", metavar="PREFIX")
    head.add("-n --documents", "N", "number of documents (default: 3)", default=3)
    head.add("--tokens", "N", "at most N tokens of each (default: 256; 0: all)", default=256)
    names = head.add_argument_group("tokenizer", "without one, ids are shown")
    names.add_argument("--tokenizer-type", metavar="TYPE")
    names.add_argument("--vocab-file", "--vocab", metavar="FILE")
    names.add_argument("--merge-file", metavar="FILE")
    names.add_argument("--tokenizer-model", metavar="FILE")
    names.add_argument("--tokenizer-name-or-path", metavar="NAME")
    names.add_argument("--vocab-size", type=int, metavar="N")
    names.add_argument("--vocab-extra-ids", type=int, metavar="N", default=0)
    head.set_defaults(function=_head)
    merge = commands.add_parser("merge", help="merge several pairs into one")
    text = "pairs in the order given; for a folder, all its pairs, sorted by name"
    merge.add("--input", "PREFIX|FOLDER", text, nargs="+", required=True)
    merge.add_argument("--output-prefix", required=True, metavar="PREFIX")
    merge.add("--overwrite", "", "replace a pair of that name")
    merge.set_defaults(function=_merge)
    return parser


def _info(options: argparse.Namespace) -> None:
    from rapidformer.data.indexed.reader import describe_indexed

    damaged = []
    for prefix in options.prefixes:
        facts = describe_indexed(prefix)
        damaged += [facts["prefix"]] if facts["damage"] else []
        sys.stdout.write((json.dumps(facts) if options.json else _format_facts(facts)) + "\n")
    if damaged:
        # Raised at the end, so that the other pairs are shown and a script sees the exit status.
        raise DataError(f"{', '.join(damaged)} cannot be used for training.")


def _format_facts(facts: dict[str, Any]) -> str:
    lines = [facts["prefix"]]
    sizes = [(ending, facts[f"{ending}_bytes"]) for ending in ("bin", "idx")]
    listed = ", ".join(f".{end} {'missing' if n is None else f'{n:,}'}" for end, n in sizes)
    if facts["damage"]:
        lines += [f"  {'bytes':<14}{listed}"]
        lines += [f"  {'problem':<14}{reason}" for reason in facts["damage"]]
        return "\n".join(lines)
    kind = "mmap" if facts["format"] == "mmap" else "lazy/cached (older format)"
    rows = {
        "format": kind + (", with multimodal modes" if facts["multimodal"] else ""),
        **{name: f"{facts[name]:,}" for name in ("documents", "sequences")},
        "tokens": f"{facts['tokens']:,} of {facts['dtype']}",
        "bytes": listed,
        "per document": _format_lengths(facts["document_length"]),
        "per sequence": _format_lengths(facts["sequence_length"]),
        "damage": "none",
    }
    return "\n".join(lines + [f"  {name:<14}{value}" for name, value in rows.items()])


def _format_lengths(lengths: dict[str, float] | None) -> str:
    if lengths is None:
        return "none"
    return ", ".join(f"{name} {value:,.10g}" for name, value in lengths.items()) + " tokens"


def _head(options: argparse.Namespace) -> None:
    from rapidformer.data.indexed import open_indexed

    problems = []
    if options.documents < 1:
        problems.append(f"-n {options.documents}: must be at least 1.")
    if options.tokens < 0:
        problems.append(f"--tokens {options.tokens}: give a number of tokens, or 0 for all.")
    raise_problems(problems)
    dataset = open_indexed(options.prefix)
    tokenizer = _build_tokenizer(options)
    count = min(options.documents, dataset.num_documents)
    if count == 0:
        sys.stdout.write(f"{dataset.prefix} has no documents.\n")
    for document in range(count):
        for line in _format_document(dataset, document, tokenizer, options.tokens):
            sys.stdout.write(line + "\n")


def _build_tokenizer(options: argparse.Namespace) -> Tokenizer | None:
    given = {name: getattr(options, name) for name in TOKENIZER}
    if all(value is None for value in given.values()):
        return None
    from rapidformer.data.tokenizers import build_tokenizer

    return build_tokenizer(**given, vocab_extra_ids=options.vocab_extra_ids)


def _format_document(
    dataset: IndexedDataset, document: int, tokenizer: Tokenizer | None, limit: int
) -> list[str]:
    """A title, then one line per sequence (more if the text itself has line breaks)."""
    first, last = (int(mark) for mark in dataset.doc_idx[document : document + 2])
    total = int(dataset.sizes[first:last].sum())
    lines = [
        f"--- document {document}: {counted(last - first, 'sequence')}, {counted(total, 'token')}"
    ]
    left = min(limit, total) if limit else total
    shown = 0
    for sequence in range(first, last):
        if shown == left and shown < total:
            break
        ids = dataset.get(sequence)[: left - shown].tolist()
        shown += len(ids)
        lines.append(" ".join(map(str, ids)) if tokenizer is None else _decode(ids, tokenizer))
    if shown < total:
        lines.append(f"... {counted(total - shown, 'more token')}")
    return lines


def _decode(ids: list[int], tokenizer: Tokenizer) -> str:
    if ids and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise DataError(
            f"the files contain the token id {wrong}, but {tokenizer.name} has only "
            f"{tokenizer.vocab_size} tokens: they were created with another tokenizer."
        )
    return tokenizer.detokenize(ids)


def _merge(options: argparse.Namespace) -> None:
    from rapidformer.data.indexed import has_indexed, list_prefixes, merge_indexed
    from rapidformer.data.indexed.layout import get_data_path, get_index_path, is_file, name_target
    from rapidformer.data.indexed.reader import describe_indexed

    prefixes: list[str] = []
    for word in options.input:
        folder = Path(word)
        is_folder = folder.is_dir() and not has_indexed(word)
        pairs = [str(folder / name) for name in list_prefixes(folder)] if is_folder else [word]
        if not pairs:
            raise DataError(f"--input {word}: the folder has no .bin/.idx pair.")
        prefixes += pairs
    output = name_target(options.output_prefix)
    paths = get_data_path(output), get_index_path(output)
    existing = [path for path in paths if is_file(path)]
    if existing and not options.overwrite:
        raise DataError(
            f"{existing[0]} already exists: choose another --output-prefix, or replace it with "
            "--overwrite."
        )
    merge_indexed(prefixes, output)
    sys.stdout.write(f"{counted(len(prefixes), 'pair')} merged\n")
    sys.stdout.write(_format_facts(describe_indexed(output)) + "\n")
