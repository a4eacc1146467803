"""``rapidformer data show``: the first rows of a run's data as the model sees them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.cli.own_flags import CommandParser
from rapidformer.config import Settings, parse_arguments, resolve
from rapidformer.errors import ConfigurationError, DataError, raise_problems
from rapidformer.log import configure_logging

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from rapidformer.data.label_view import ShownRow, ShownToken

_EXAMPLES = """\
examples:
  rapidformer data show --task causal_lm --data-path chats.jsonl \\
      --pretrained-model-name-or-path Qwen/Qwen3-0.6B --seq-length 1024
  rapidformer data show --load runs/chat --split validation -n 1 --table

All other flags are those of the run.
"""
# Enough rows to fill what is shown; tasks whose rows do not depend on each other need no more.
_PREPARED_ROWS = 1000
_INDEPENDENT = frozenset({
    "causal_lm", "distillation", "masked_lm", "seq2seq_lm", "question_answering", "preference",
    "reward", "embedding", "reranking", "image_text",
})  # fmt: skip
_TRAINED, _SPECIAL, _NOTE = "black on green", "bold", "italic magenta"
_OPEN = "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}"
_CLOSE = "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"
_PICTURE_WIDTH = 32
"""In characters; a character is two pixels high."""
_LINE_BREAK = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n"


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="rapidformer data show",
        description="Show the first rows of a run's data, and which tokens are trained on.",
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add("-n --rows", "N", "number of rows (default: 3)", default=3)
    parser.add("--split", "NAME", "train (the default), validation or test", default="train")
    parser.add("--tokens", "N", "at most N tokens of each (default: 512; 0: all)", default=512)
    parser.add("--table", "", "one token per line, with its id and label")
    return parser


def run(argv: list[str]) -> None:
    """Prepare the data as training would, and print its first rows."""
    options, words = build_parser().parse_known_args(argv)
    args = _read_settings(options, words)
    from rapidformer.tasks.registry import get_task

    task = get_task(args.task or "")
    if task.name in _INDEPENDENT:
        rows = max(_PREPARED_ROWS, options.rows)
        limits = ("max_train_samples", "max_eval_samples", "max_predict_samples")
        args = args.replace("data show", **{n: getattr(args, n) or rows for n in limits})
    from rapidformer.tasks.mixture import prepare_data

    prepared = prepare_data(task, args)
    features = prepared.get_split(options.split)
    if features is None:
        raise DataError(f"the data has no split {options.split!r} with labels: choose another.")
    _show(features, prepared, options)


def _read_settings(options: argparse.Namespace, words: list[str]) -> Settings:
    from rapidformer.cli.run_model import choose_run_model
    from rapidformer.tasks.registry import is_pretraining
    from rapidformer.tasks.rows.preflight import find_task_problems

    problems = []
    if options.rows < 1:
        problems.append(f"-n {options.rows}: must be at least 1.")
    if options.tokens < 0:
        problems.append(f"--tokens {options.tokens}: give a number of tokens, or 0 for all.")
    if options.split not in ("train", "validation", "test"):
        problems.append(f"--split {options.split}: use train, validation or test.")
    # For its data and the way to read them, a run that is shown is one that is evaluated.
    args = choose_run_model(parse_arguments(words), "evaluate")
    if is_pretraining(args.task):
        raise ConfigurationError(
            "data show needs rows of a table, and --task pretraining reads .bin/.idx files: use "
            "`rapidformer data head`."
        )
    # The rows are shown without weights, and where the run computes and saves does not matter.
    here = args.replace("data show", device="cpu", from_scratch=True)
    if args.task is None:
        problems.append("nothing to show: give --task and --data-path, or --load RUN.")
    else:
        problems += find_task_problems(here, "data show", 0)
    raise_problems(problems)
    configure_logging(args.log_level)
    return resolve(args, world_size=1)


def _show(features: Any, prepared: Any, options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.text import Text

    from rapidformer.data.label_view import count_tokens, view_batch
    from rapidformer.tasks.rows.named_files import describe_image
    from rapidformer.tasks.rows.rows import is_row_stream

    is_stream = is_row_stream(features)
    if is_stream:
        features = features.peek(options.rows)
    # A file gets no line breaks but those of the text.
    console = Console(soft_wrap=True, highlight=False, markup=False)
    sets: Any = getattr(features, "sets", None)
    has_trained = False
    total = len(features) if sets is None else sets.num_samples
    # Of a mixture as it is trained on, but not shuffled: the sets by turns.
    is_weighted = sets is not None and sets.weights is not None
    places = sets.list_numbers(0, 0, shuffles=False) if is_weighted else range(total)
    for number, place in enumerate(places[: options.rows]):
        feature = features[int(place)]
        rows = view_batch(prepared.collate([feature]), prepared)
        tokens, trained = count_tokens(rows)
        title = f"--- {options.split}, row {number + 1}" + ("" if is_stream else f" of {total:,}")
        if sets is not None:
            title += f" ({sets.find_row(place)})"
        if tokens:
            title += f": {tokens:,} tokens"
        if trained:
            has_trained = True
            title += f", {trained:,} trained on ({100 * trained / tokens:.1f}%)"
        console.print(title, style="bold cyan")
        if hasattr(features, "describe"):  # of a recording
            console.print(features.describe(number))
        if isinstance(feature, dict) and "conversation" in feature:
            for image, given in zip(feature["images"], feature["conversation"].images, strict=True):
                size = f"{image.width} x {image.height} pixels"
                console.print(f"{describe_image(given)}, {size}", style="bold")
                if console.color_system is not None:
                    console.print(draw_image(image))
        for row in rows:
            _print_row(row, options, console)
    has_colours = console.color_system is not None
    if has_trained and (has_colours or not options.table):  # a table without colours has words
        mark = "trained on" if has_colours else f"{_OPEN}...{_CLOSE} trained on"
        legend = Text(mark, style=_TRAINED if has_colours else "")
        console.print(Text.assemble(legend, " (all else is only read)"))


def _print_row(row: ShownRow, options: argparse.Namespace, console: Console) -> None:
    if row.name:
        console.print(row.name, style="bold")
    shown = row.tokens[: options.tokens or None]
    if options.table:
        _print_table(shown, console)
    elif shown:
        console.print(format_tokens(shown, has_colours=console.color_system is not None))
    if len(shown) < len(row.tokens):
        console.print(f"... {len(row.tokens) - len(shown):,} more tokens")
    if row.fact:
        console.print(row.fact, style=_NOTE)


def draw_image(image: Any) -> Text:
    """A small picture of it: half a character is a pixel."""
    from rich.text import Text

    width = min(_PICTURE_WIDTH, image.width)
    height = max(2, round(width * image.height / image.width / 2) * 2)
    pixels = image.resize((width, min(height, _PICTURE_WIDTH))).load()
    lines = []
    for y in range(0, min(height, _PICTURE_WIDTH), 2):
        line = Text()
        for x in range(width):
            upper, lower = ("#{:02x}{:02x}{:02x}".format(*pixels[x, y + n]) for n in (0, 1))
            line.append("\N{UPPER HALF BLOCK}", style=f"{upper} on {lower}")
        lines.append(line)
    return Text("\n").join(lines)


def format_tokens(tokens: Sequence[ShownToken], *, has_colours: bool) -> Text:
    """The row as running text: colours, or brackets around runs of tokens that are trained on."""
    from rich.text import Text

    text = Text()
    is_open = False
    for token in tokens:
        if not has_colours and is_open and (not token.is_trained or token.begins_example):
            text.append(_CLOSE)
            is_open = False
        if token.begins_example:
            text.append("\n--- next example of the row\n")
        if not has_colours and token.is_trained and not is_open:
            text.append(_OPEN)
            is_open = True
        shown = token.text.replace("\n", _LINE_BREAK)
        styles = (_TRAINED if token.is_trained else "", _SPECIAL if token.is_special else "")
        text.append(shown, style=" ".join(styles).strip())
        if token.note:
            text.append(f"<{token.note.strip()}>", style=_NOTE)
    if is_open:
        text.append(_CLOSE)
    return text


def _print_table(tokens: Sequence[ShownToken], console: Console) -> None:
    width = max((len(repr(token.piece)) for token in tokens), default=0)
    for place, token in enumerate(tokens):
        mark = "trained" if token.is_trained else ""
        note = f"<{token.note.strip()}>" if token.note else ""
        line = f"{place:>5} {token.number:>7}  {token.piece!r:<{width}}  {mark} {note}".rstrip()
        console.print(line, style=_TRAINED if token.is_trained else "")
