"""``rapidformer export CHECKPOINT OUT``: a folder that plain transformers loads, proven.

Or one with a GGUF file or an ONNX graph; ``--push`` sends it to the Hub.
"""

from __future__ import annotations

import shutil
import tempfile
from argparse import BooleanOptionalAction
from dataclasses import asdict
from pathlib import Path

from rapidformer.cli.own_flags import CommandParser
from rapidformer.errors import ConfigurationError
from rapidformer.log import configure_logging
from rapidformer.run_events import append_event, find_run

_DESCRIPTION = """\
Write the model of a run as a Hugging Face folder, from a checkpoint of any layout, without having
all of it in memory. The folder is then loaded in a new process by plain transformers, and its
logits are compared with the trained model's; it gets its name only if they agree. --format gguf
writes a language model for llama.cpp and Ollama, --format onnx an encoder for onnxruntime."""


def run(argv: list[str]) -> None:
    args = _build_parser().parse_args(argv)
    checkpoint, out = args.checkpoint or args.load, args.out or args.save
    if args.load and args.checkpoint and not args.out:  # export --load RUN OUT
        checkpoint, out = args.load, out or args.checkpoint
    if not checkpoint or not (out or args.push):
        raise ConfigurationError(
            "export needs what to export and where to: rapidformer export CHECKPOINT OUT (or "
            "--load and --save), or rapidformer export CHECKPOINT --push NAME."
        )
    configure_logging(args.log_level)
    from rapidformer.checkpoint.exporting.export import export

    place = None if out else Path(tempfile.mkdtemp(prefix="export-"))
    target = Path(out) if place is None else place / args.push.rpartition("/")[2]
    try:
        report = export(
            checkpoint, target, format=args.format, dtype=args.dtype, quantize=args.quantize,
            max_shard_size=args.max_shard_size, merge=args.merge, verify=args.verify,
            allow_unchanged=args.allow_unchanged, base=args.base, push=args.push,
            private=args.private, license=args.license,
        )  # fmt: skip
    except BaseException:
        if place is not None and not target.exists():
            shutil.rmtree(place)  # an export that could not be pushed is kept
        raise
    if place is not None:
        shutil.rmtree(place)
    if folder := find_run(Path(checkpoint).expanduser()):  # for its page
        append_event(folder, "export", facts=asdict(report))


def _build_parser() -> CommandParser:
    parser = CommandParser(prog="rapidformer export", description=_DESCRIPTION, allow_abbrev=False)
    parser.add(
        "checkpoint", "CHECKPOINT", "a run (its best model, or the last, or the newest "
        "checkpoint), a checkpoint, a model or an adapter; --load is the same", nargs="?",
    )  # fmt: skip
    parser.add("out", "OUT", "the folder to write; --save is the same", nargs="?")
    parser.add_argument("--load", help="CHECKPOINT")
    parser.add_argument("--save", help="OUT")
    parser.add_argument(
        "--format", choices=("transformers", "gguf", "onnx"), default="transformers",
        help="of the export (default: transformers)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="default: as the weights were saved"
    )
    text = "of a GGUF file: q8_0, or, with llama.cpp installed, q4_k_m and its other K-quants"
    parser.add("--quantize", "TYPE", text)
    parser.add("--max-shard-size", "SIZE", "of one file (default: 5GB)", default="5GB")
    for name, text in (
        ("merge", "merge an adapter into the weights (--no-merge: the adapter alone)"),
        ("verify", "prove the export in a new process (--no-verify: do not)"),
    ):
        parser.add_argument(f"--{name}", action=BooleanOptionalAction, default=True, help=text)
    text = "export a model although all of its weights are those of the base model"
    parser.add("--allow-unchanged", "", text)
    parser.add("--base", "MODEL", "the model that training started from, if it has moved")
    parser.add("--push", "ORG/NAME", "send the export to the Hub, in one commit with a model card")
    parser.add("--private", "", "--push: a new repository is private")
    parser.add(
        "--license", "NAME", "for the model card (default: the base model's, if it is known)"
    )
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error")
    )
    return parser
