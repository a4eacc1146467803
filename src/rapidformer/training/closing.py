"""The last lines of a run: what was saved where, which model is the best, and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from rapidformer.config import Settings
from rapidformer.models.location import is_model_folder
from rapidformer.training.run_folder import BEST, LAST


def describe_results(
    args: Settings, *, step: int, total: int, best: tuple[str, float, int] | None
) -> Iterator[str]:
    """One line per subject; ``best`` is the metric, its value and its step."""
    if args.save is None:
        yield "saved     nothing (--save none)"
        return
    if args.save_strategy == "no":
        kept = "only metrics" if best is None else f"only metrics and the {BEST} model"
        yield f"saved     {kept}, in {args.save} (--save-strategy no)"
        return
    folder = Path(args.save)
    if best is not None:
        name, value, at = best
        yield f"best      {name} {value:.4f} at step {at}: {folder / BEST}"
    elif args.task is not None:
        yield "best      none: nothing was evaluated"
    yield f"last      step {step} of {total}: {folder / LAST}"
    if step < total:
        yield f"resume    run the same command with --load {shlex.quote(str(folder))}"
    yield from _suggest(args, folder, folder / (BEST if best is not None else LAST))


def describe_finished(args: Settings, *, step: int, total: int) -> Iterator[str]:
    """The message of a resumed run that is already at its end."""
    folder = Path(args.save or args.load or "")
    yield (
        f"nothing left to do: {folder} is at step {step}, and this run ends at step {total}. "
        "To train longer, increase --epochs or --train-iters."
    )
    has_best = (folder / BEST).is_dir()
    yield from _suggest(args, folder, folder / (BEST if has_best else LAST))


def _suggest(args: Settings, folder: Path, model: Path) -> Iterator[str]:
    run, is_black_box = shlex.quote(str(folder)), args.task and args.user_script is None
    if is_black_box:
        yield f"next      rapidformer evaluate --load {run}"
        if args.task != "pretraining":
            yield f"          rapidformer predict --load {run} --data-path FILE --output FILE"
    elif is_model_folder(model):
        yield f'next      load the model with from_pretrained("{model}")'
    else:  # a custom model, which has no configuration
        weights = model / "model.safetensors"
        yield f'next      model.load_state_dict(safetensors.torch.load_file("{weights}"))'
    yield f"          rapidformer plot {run}"
