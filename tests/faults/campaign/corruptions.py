"""Damage a file of a run's newest checkpoint; it must be noticed, and the one before be taken."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rapidformer.checkpoint.finding import find_checkpoints
from rapidformer.checkpoint.loading import check_checkpoint, choose_complete
from rapidformer.errors import CheckpointError

Damage = Callable[[Path, random.Random], None]


def flip_a_bit(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def zero_a_block(path: Path, dice: random.Random) -> None:
    """What a file system does after a crash to pages that it never wrote."""
    content = bytearray(path.read_bytes())
    start = dice.randrange(len(content))
    end = min(len(content), start + dice.choice([1, 64, 4096]))
    # A block that is zero already would be no damage.
    content[start:end] = bytes(end - start) if any(content[start:end]) else b"\1" * (end - start)
    path.write_bytes(content)


def cut(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size))


def append(path: Path, dice: random.Random) -> None:
    path.write_bytes(path.read_bytes() + dice.randbytes(dice.randint(1, 64)))


def delete(path: Path, dice: random.Random) -> None:
    path.unlink()


def replace_by_noise(path: Path, dice: random.Random) -> None:
    path.write_bytes(dice.randbytes(path.stat().st_size))


def replace_by_folder(path: Path, dice: random.Random) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path, dice: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path: Path, dice: random.Random) -> None:
    """To a file with the right content, but outside of the checkpoint."""
    elsewhere = path.parents[2] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


DAMAGES: tuple[Damage, ...] = (
    flip_a_bit, zero_a_block, cut, append, delete, replace_by_noise, replace_by_folder,
    replace_by_pipe, replace_by_link,
)  # fmt: skip


@dataclass
class Corruption:
    """A damaged file, and what was wrong with the answer to it."""

    damage: str
    file: str
    problems: list[str] = field(default_factory=list)


def corrupt_once(run: Path, folder: Path, damage: Damage, dice: random.Random) -> Corruption:
    """Damage a copy of the run, and choose a checkpoint from it."""
    shutil.copytree(run, folder)
    *_, before, newest = find_checkpoints(folder)
    # Sorted: the same seed must damage the same files.
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    path = dice.choice(files)
    found = Corruption(damage.__name__.replace("_", " "), str(path.relative_to(newest)))
    damage(path, dice)
    try:
        check_checkpoint(newest)
        found.problems.append("it was not noticed")
    except CheckpointError as reason:
        if "\n" in str(reason):
            found.problems.append(f"more than a sentence: {reason}")
    except Exception as error:
        found.problems.append(f"a crash instead of a sentence: {error!r}")
    if not found.problems and (chosen := choose_complete(folder)) != before:
        found.problems.append(f"{chosen.name} was chosen instead of {before.name}")
    return found


def run_corruptions(run: Path, folder: Path, *, runs: int, seed: int) -> Iterator[Corruption]:
    """All kinds of damage in turn, each to a random file at a random place."""
    dice = random.Random(seed)
    for number in range(runs):
        place = folder / f"corruption_{number}"
        found = corrupt_once(run, place, DAMAGES[number % len(DAMAGES)], dice)
        if not found.problems:
            shutil.rmtree(place)
        yield found
