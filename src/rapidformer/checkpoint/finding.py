"""What is in a run's folder: its checkpoints by their names, and the names of everything else.

Imports no torch: the launcher and `rapidformer runs` look for checkpoints too, and answer at once.

A run that goes back (``--load RUN/iter_0000006 --save RUN``) leaves its later part behind: later
checkpoints are moved to ``.abandoned/`` before the first new step, so that nothing resumes from
them, and deleted once the new branch has its first checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.publish import read_json, replace_text
from rapidformer.config import Settings
from rapidformer.errors import CheckpointError
from rapidformer.log import get_logger

TRACKER = "latest_checkpointed_iteration.txt"
METRICS_FILE = "metrics.jsonl"
ARGUMENTS_FILE = "arguments.yaml"
TRACKERS_FOLDER = "trackers"
"""The folder with the files of trackers and the ids that they gave to the run."""
RUN_FILE = ".run.json"
"""What the run writes, and the step of its best model."""
PREVIOUS = "previous"
"""An earlier run, kept by front ends that train into the same folder again."""
REPLACED = ".replaced"
"""A whole earlier run, until the new one has a checkpoint."""
ABANDONED = ".abandoned"
_SETTING = re.compile(r"(?:# )?(\w+): (.*)")


def find_checkpoints(folder: Path) -> list[Path]:
    """The published checkpoints of a run, oldest first."""
    named = (path for path in folder.glob("iter_*") if path.is_dir() and is_named(path))
    return sorted(named, key=get_step)


def is_named(folder: Path) -> bool:
    """Whether a folder's name is that of a checkpoint."""
    return folder.name.startswith("iter_") and _is_number(folder.name[5:])


def _is_number(text: str) -> bool:
    """Whether the text is a step; Python converts neither `²` nor thousands of digits."""
    return text.isascii() and text.isdecimal() and len(text) < 20


def name_checkpoint(step: int) -> str:
    return f"iter_{step:07d}"


def get_step(checkpoint: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(checkpoint.name[5:])


def find_checkpoint(source: Path) -> Path | None:
    """A checkpoint's own folder, or the newest of a run's; None if there is none."""
    if (source / RUN).is_file() and (source / "state").is_dir():
        return source
    tracker = source / TRACKER
    if tracker.is_file():
        # Another trainer may have written `release` there, and a crash anything.
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
        named = source / name_checkpoint(int(text) if _is_number(text) else 0)
        if named.is_dir():
            return named
    return next(reversed(find_checkpoints(source)), None)


def read_arguments(folder: Path) -> dict[str, Any]:
    """The settings of a run; none if they cannot be read."""
    import yaml

    try:
        content = yaml.safe_load((folder / ARGUMENTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def list_arguments(folder: Path) -> Iterator[list[str]]:
    """Section, name, value and origin of each setting, as ``arguments.yaml`` shows them."""
    path, section = folder / ARGUMENTS_FILE, ""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.splitlines():
        shown, _, origin = line.rpartition(" # ")
        if match := _SETTING.fullmatch(shown.strip()):
            yield [section, match[1], match[2].strip(), origin]
        elif line.startswith("# "):
            section = line[2:]


def abandon_later(folder: Path, step: int, results: Iterable[str] = ()) -> None:
    """Move checkpoints after this step aside, and with them the results of the run's end."""
    later = [path for path in find_checkpoints(folder) if get_step(path) > step]
    if later:
        replace_text(folder / TRACKER, str(step))
        abandon(folder, [*later, *(folder / name for name in results)])
        get_logger().info(
            f"going back to step {step}: {', '.join(path.name for path in later)} moved to "
            f"{folder / ABANDONED}, until this run has a checkpoint"
        )


def abandon(folder: Path, paths: Iterable[Path]) -> None:
    """Move some of a run's files aside."""
    (folder / ABANDONED).mkdir(exist_ok=True)
    for path in paths:
        target = folder / ABANDONED / path.name
        if path.exists():
            shutil.rmtree(target, ignore_errors=True)
            path.rename(target)


def set_checkpoints_aside(folder: Path) -> None:
    """Move an earlier run's checkpoints to a folder of their own, where they can be resumed."""
    checkpoints = find_checkpoints(folder)
    if not checkpoints:
        return
    names = (f"{PREVIOUS}-{number}" if number > 1 else PREVIOUS for number in count(1))
    target = next(folder / name for name in names if not (folder / name).exists())
    target.mkdir()
    for path in (*checkpoints, folder / TRACKER):
        if path.exists():
            path.rename(target / path.name)
    get_logger().warning(
        f"{folder} held checkpoints of a run that this one does not continue "
        f"({', '.join(path.name for path in checkpoints)}): moved to {target}. To continue such a "
        "run, call engine.load_checkpoint(folder) after compose()."
    )


def drop_abandoned(folder: Path) -> None:
    """Delete what the run has left behind."""
    shutil.rmtree(folder / ABANDONED, ignore_errors=True)


OWNER_FILE = ".launch"


def claim_folder(folder: Path) -> None:
    """Leave the name of this launch in the folder; without a launcher there is none.

    A restart by the launcher continues without asking, but only in a folder with its name: another
    may hold a run that the first attempt was about to refuse.
    """
    name = get_launch_name()
    if name is not None and _read_owner(folder) != name:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / OWNER_FILE, name)


def continue_after_restart(args: Settings) -> Settings:
    """The settings for another attempt: load what was saved, or start over if there is nothing."""
    if args.save is None:
        return args
    folder, source = Path(args.save), "derived: --resume auto"
    if args.resume != "auto":
        name, source = get_launch_name(), "restart"
        if not is_restart() or name is None or _read_owner(folder) != name:
            return args
    if find_checkpoint(folder):
        return args.replace(source, load=args.save, finetune=False, overwrite=False)
    return args.replace(source, overwrite=True)


def find_claimed_folder(root: Path) -> Path | None:
    """The folder under ``root`` that an earlier attempt of this launch claimed."""
    name = get_launch_name()
    if name is None or not is_restart() or not root.is_dir():
        return None
    return next((folder for folder in root.iterdir() if _read_owner(folder) == name), None)


def is_restart() -> bool:
    """Whether the launcher has started this run before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def get_launch_name() -> str | None:
    """The launcher's name for this run and its restarts; None if it has none of its own."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return name if name not in ("", "none") else None  # "none" is torchrun's for any run


def _read_owner(folder: Path) -> str | None:
    path = folder / OWNER_FILE
    try:
        return path.read_text(encoding="utf-8").strip() if path.is_file() else None
    except (OSError, ValueError):
        return None


RUN = "run.json"
STATE_INDEX = "state/index.json"
FORMAT = 1
_KINDS: dict[str, Any] = {
    "step": int, "scheduler": dict, "scaler": dict | None, "loader": dict | None,
    "param_groups": list | None, "extra": dict,
}  # fmt: skip
_OPTIONAL = ("tied", "facts", "base", "counter")
_LARGEST = 2**53
"""More steps or samples than any run has; JSON's numbers are exact up to here."""


def read_run(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's ``run.json``, with entries of the right kinds."""
    run = read_json(folder / RUN)
    if run.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {run.get('format')}, this version reads format {FORMAT}."
        )
    wrong = [name for name, kind in _KINDS.items() if not isinstance(run.get(name, ...), kind)]
    wrong += [name for name in _OPTIONAL if not isinstance(run.get(name, {}), dict)]
    if not wrong:
        checks = {
            "step": _is_count(run["step"]),
            "scheduler": _is_count(run["scheduler"].get("last_epoch", 0)),
            "tied": all(isinstance(name, str) for name in run.get("tied", {}).values()),
        }
        wrong = [name for name, is_sound in checks.items() if not is_sound]
    if not wrong and (place := run["loader"]) is not None:
        cursor = place.get("cursor", {})  # of a stream
        counts = [value for name, value in place.items() if name != "cursor"]
        numbers = [place.get("epoch"), place.get("consumed_samples"), *counts]
        is_sound = all(map(_is_count, numbers)) and isinstance(cursor, dict)
        wrong = [] if is_sound else ["loader"]
    if wrong:
        raise _build_error(folder, f"{', '.join(wrong)} is missing or malformed")
    return run


@contextmanager
def blaming(folder: Path) -> Iterator[None]:
    """Report what cannot be restored from a ``run.json`` as the file's fault."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as reason:
        raise _build_error(folder, f"{type(reason).__name__}: {reason}") from None


def _is_count(number: Any) -> bool:
    is_whole = isinstance(number, int) and not isinstance(number, bool)
    return is_whole and 0 <= number <= _LARGEST


def _build_error(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{folder / RUN} is not what a run writes: {reason}.")
