"""``rapidformer check``: verify every hash and tensor of a checkpoint, run or model folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rapidformer.checkpoint.finding import find_checkpoints
from rapidformer.checkpoint.inventory import is_checkpoint
from rapidformer.checkpoint.publish import read_manifest
from rapidformer.cli.own_flags import CommandParser
from rapidformer.cli.runs import format_size
from rapidformer.errors import CheckpointError, list_some
from rapidformer.hub import suggest_path

_MODELS = ("best", "last")
_WEIGHTS = "*.safetensors"


class DamageError(CheckpointError):
    """Something is wrong; every problem has been printed already."""

    is_told = True


def run(argv: list[str]) -> None:
    options = build_parser().parse_args(argv)
    folders = [folder for path in options.paths for folder in _choose(Path(path).expanduser())]
    is_damaged = False
    with _show_progress(sum(map(_measure, folders))) as advance:
        for folder in folders:
            is_damaged |= _check(folder, advance, finite=options.finite)
    if is_damaged:
        raise DamageError("damaged")


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="rapidformer check",
        description="Verify checkpoints: every file against its hash, and that the index covers "
        "every tensor. Of a run, all checkpoints and models are checked. Exits with 1 if anything "
        "is wrong.",
    )
    parser.add("paths", "PATH", "a checkpoint, a run, or a model or adapter folder", nargs="+")
    parser.add("--finite", "", "also read all tensors, and look for NaN and infinity")
    return parser


def _choose(path: Path) -> list[Path]:
    """The folders to check under a path."""
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:
        raise CheckpointError(f"{str(path)[:200]}: {error.strerror}.") from None
    if not is_folder:
        reason = "is not a folder" if is_there else "does not exist"
        raise CheckpointError(f"{path} {reason}.{suggest_path(path)}")
    if is_checkpoint(path) or _is_model(path):
        return [path]
    models = [path / name for name in _MODELS if _is_model(path / name)]
    folders = [*filter(is_checkpoint, find_checkpoints(path)), *models]
    if not folders:
        raise CheckpointError(
            f"{path} is neither a checkpoint nor a run nor a model folder: there is nothing to "
            "check. `rapidformer runs` lists the runs in a folder."
        )
    return folders


def _is_model(folder: Path) -> bool:
    return any(folder.glob(_WEIGHTS))


def _measure(folder: Path) -> int:
    try:
        sizes = [size for size, _ in read_manifest(folder).values()]
        return sum(size for size in sizes if isinstance(size, int))
    except CheckpointError:
        return 0


def _check(folder: Path, advance: Callable[[int], None], *, finite: bool) -> bool:
    """Print what is wrong with a folder, and whether anything is."""
    from rapidformer.checkpoint import inspection

    inspect = inspection.inspect_checkpoint if is_checkpoint(folder) else inspection.inspect_model
    count = 0
    for problem in _guarded(inspect(folder, advance, finite=finite)):
        if not folder.is_dir():
            print(f"{folder}: deleted while it was checked", flush=True)
            return False
        print(f"{folder}: {problem}", flush=True)
        count += 1
    if count:
        print(f"{folder}: damaged ({count} problem{'s' * (count > 1)})", flush=True)
        return True
    unlisted = inspection.list_unlisted(folder)
    if unlisted:
        print(f"{folder}: not checked: {list_some(unlisted)} (not in the manifest)", flush=True)
    if inspection.has_hashes(folder):
        print(f"{folder}: complete ({format_size(_measure(folder))} verified)", flush=True)
    else:
        print(f"{folder}: readable, but not verified: it has no hashes", flush=True)
    return False


def _guarded(problems: Iterator[str]) -> Iterator[str]:
    """A disk that fails, or files that vanish, are problems like any other."""
    try:
        yield from problems
    except OSError as reason:
        yield f"{reason.filename or 'a file'} cannot be read ({reason.strerror})"


@contextmanager
def _show_progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar over the bytes to hash, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("checking"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
        TextColumn("left"),
    )  # fmt: skip
    # Lines on the same terminal must go above the bar, and all others where they belong.
    shares = sys.stdout.isatty()
    console = Console(stderr=True)
    with Progress(*columns, console=console, redirect_stdout=shares, transient=True) as progress:
        task = progress.add_task("checking", total=total)
        yield lambda count: progress.advance(task, count)
