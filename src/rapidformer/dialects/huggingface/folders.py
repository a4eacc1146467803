"""A trainer's checkpoints as folders that scripts look for and ``from_pretrained`` reads."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from rapidformer.checkpoint.finding import find_checkpoint
from rapidformer.engine.checkpoints import EXPORTED
from rapidformer.errors import CheckpointError
from rapidformer.models.location import DESCRIPTION


def link_checkpoint(folder: Path, step: int) -> None:
    """``checkpoint-500`` next to ``iter_0000500``: the name that scripts look for."""
    for link in folder.parent.glob("checkpoint-*"):
        if link.is_symlink() and not link.exists():
            link.unlink()  # its checkpoint has been removed
    with contextlib.suppress(OSError):  # a file system without links
        (folder.parent / f"checkpoint-{step}").symlink_to(folder.name)


def list_weights(checkpoint: Path) -> list[tuple[str, int]]:
    files = sorted(checkpoint.glob("model*.safetensors"))
    return [(path.name, path.stat().st_mtime_ns) for path in files]


def lift_model(checkpoint: Path) -> None:
    """Configuration, tokenizer and adapter as well where ``from_pretrained`` looks for them."""
    for source in (checkpoint / EXPORTED, checkpoint / DESCRIPTION):
        for path in source.glob("*"):
            target = checkpoint / path.name
            if path.is_file() and not target.exists():
                shutil.copyfile(path, target)  # no link: a callback may overwrite it


def find_checkpoint_folder(asked: str | bool | Path | None, output_dir: str | None) -> Path | None:
    """What ``resume_from_checkpoint`` means: True is the newest one in the output folder."""
    if asked is None or asked is False or asked == "":
        return None
    is_newest = asked is True or str(asked).lower() == "true"
    source = Path(output_dir or ".") if is_newest else Path(str(asked)).expanduser()
    checkpoint = find_checkpoint(source.resolve()) if source.is_dir() else None
    if checkpoint is None:
        raise CheckpointError(
            f"resume_from_checkpoint={asked!r}: {source} holds no checkpoint (iter_… folders). "
            "Checkpoints of transformers' own Trainer cannot be resumed: start from their weights "
            "with from_pretrained()."
        )
    return checkpoint
