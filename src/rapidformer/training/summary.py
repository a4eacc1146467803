"""The first lines of a run, every number that determines it, and the last: what was saved."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rapidformer.accel.precision.processor import has_bf16
from rapidformer.config import Settings
from rapidformer.config.deepspeed_file import get_file_schedule
from rapidformer.config.explain import list_missed
from rapidformer.config.sections import TrainingLengthArguments
from rapidformer.config.switches import Situation
from rapidformer.config.task_sections import RunArguments
from rapidformer.data.data_source import find_length
from rapidformer.data.loader import DistributedLoader
from rapidformer.dist.processes import describe_device
from rapidformer.engine import RapidformerEngine
from rapidformer.models.adapters import describe_trained
from rapidformer.models.location import is_model_folder
from rapidformer.models.plan import MARKED
from rapidformer.training.run_folder import BEST, LAST
from rapidformer.training.run_record import list_versions
from rapidformer.training.timetable import OPEN_END

_PRECISIONS = {"Bf16AdamW": "bf16", "Int8AdamW": "8 bits"}
"""Of the moments, by optimizer. By name: not all of their packages are installed."""


def describe_run(
    engine: RapidformerEngine, train_iters: int, loader: DistributedLoader, eval_data: Any
) -> list[str]:
    """One line per subject."""
    args, parallelized = engine.args, engine.model.parallelized
    model = parallelized.model
    total, trained = _count_parameters(engine)
    adapter, plan = engine.model.adapter, parallelized.plan
    count, device = args.world_size, describe_device(engine.device)
    where = f"{count} process{'es' * (count > 1)} on {device}"
    version = list_versions().get("rapidformer", "(not installed)")
    lines = [
        f"rapidformer {version}, torch {torch.__version__}, {where}",
        f"model     {type(model).__name__.removeprefix('FSDP')}: {_count(total)} parameters"
        + (f", {_count(trained)} trained" if trained != total else "")
        + f"; {len(plan.blocks)} block{'s' * (len(plan.blocks) != 1)}"
        + ("" if plan.source == MARKED else f" ({plan.source})"),
        f"data      {_size(loader)} training, {_size(eval_data)} evaluation samples",
        f"batch     {engine.data.describe_batch(loader)}",
        f"length    {_describe_length(args, train_iters)}"
        + f"; lr {_describe_rate(engine)}, {_describe_schedule(engine, train_iters)}"
        + f"; {_describe_optimizer(engine)}, clip {engine.updates.clip_grad}",
        f"switches  {'; '.join(parallelized.switches)}",
    ]
    samples = train_iters * loader.samples_per_update
    if args.train_iters is None and args.epochs is not None:
        samples = min(samples, round(args.epochs * loader.num_samples))
    lines[3:3] = loader.describe_sets(samples)
    if adapter is not None:
        lines.insert(2, f"adapter   {adapter.describe()}; {describe_trained(trained, total)}")
    precision = engine.runtime.precision.name
    advice = describe_missed_speed(args, engine.device, precision, train_iters)
    if advice is not None:
        lines.append(f"faster    {advice}")
    if args.save:
        lines.append(f"folder    {args.save}")
    if resumed_from := engine.checkpoints.resumed_from:
        lines.append(f"resumed   from {resumed_from} at step {engine.updates.clock.updates}")
    return lines


def describe_missed_speed(
    args: Settings, device: torch.device, precision: str, train_iters: int
) -> str | None:
    """The switches without which a run is probably less than two thirds as fast as it could be."""
    if args.deepspeed is not None:  # whose file may say more
        return None
    situation = Situation(device=device.type, precision=precision)
    missed = list_missed(args, situation, train_iters)
    if args.mixed_precision is None and device.type == "cuda":
        missed.insert(0, "--mixed-precision (16-bit products are several times as fast as fp32)")
    if args.mixed_precision is None and device.type == "cpu" and has_bf16():
        missed.insert(
            0, "--mixed-precision (this processor has bf16; `rapidformer bench` tries it)"
        )
    return f"with {'; '.join(missed)}" if missed else None


def describe_model(engine: RapidformerEngine) -> dict[str, Any]:
    """The model's configuration and size, as trackers keep them beside the settings."""
    model = engine.model.parallelized.model
    config: Any = getattr(model, "config", None)
    facts = dict(config.to_dict()) if hasattr(config, "to_dict") else {}
    return {**facts, "model/num_parameters": _count_parameters(engine)[0]}


def _count_parameters(engine: RapidformerEngine) -> tuple[int, int]:
    """Of the whole model, and of what is trained."""
    parallelized = engine.model.parallelized
    # These have released or split most of them.
    if (splitting := parallelized.pipeline or parallelized.deepspeed) is not None:
        return splitting.num_parameters, splitting.num_trained
    parameters = list(parallelized.model.parameters())
    return (
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
    )


def _describe_length(args: TrainingLengthArguments, train_iters: int) -> str:
    epochs = "1 epoch" if args.epochs == 1 else f"{args.epochs or 0:g} epochs"
    if train_iters == OPEN_END:
        return f"{epochs} of a stream"
    steps = f"{train_iters} step{'s' * (train_iters != 1)}"
    return f"{steps} = {epochs}" if args.epochs and not args.train_iters else steps


def _describe_rate(engine: RapidformerEngine) -> str:
    if not engine.updates.has_own_optimizer or engine.updates.optimizer is None:
        return str(engine.args.lr)
    groups = engine.updates.optimizer.param_groups
    rates = sorted({float(group.get("initial_lr", group["lr"])) for group in groups})
    return " to ".join(f"{rate:g}" for rate in dict.fromkeys((rates[0], rates[-1])))


def _describe_schedule(engine: RapidformerEngine, train_iters: int) -> str:
    if engine.updates.has_own_schedule:
        return type(engine.updates.lr_scheduler).__name__
    in_file = get_file_schedule(engine.args, train_iters)
    return in_file[0] if in_file else str(engine.args.lr_decay_style)


def _describe_optimizer(engine: RapidformerEngine) -> str:
    name = type(engine.updates.optimizer).__name__
    if name in _PRECISIONS:
        return f"AdamW (moments in {_PRECISIONS[name]}: a choice of precision)"
    return name.removeprefix("MultiTensor")


def _count(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:,}"


def _size(data: Any) -> str:
    if data is None:
        return "no"
    if getattr(data, "num_samples", None):
        return f"{data.num_samples:,}"
    dataset = getattr(data, "dataset", data)
    rows = find_length(dataset)
    return "a stream of" if rows is None else f"{rows:,}"


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


def _suggest(args: RunArguments, folder: Path, model: Path) -> Iterator[str]:
    run, is_black_box = shlex.quote(str(folder)), args.task and args.user_script is None
    if is_black_box:
        data = " --data-path FILE" if model.name != BEST else ""  # the run has none to evaluate on
        yield f"next      rapidformer evaluate --load {run}{data}"
        if args.task != "pretraining":
            yield f"          rapidformer predict --load {run} --data-path FILE --output FILE"
        if args.task in ("causal_lm", "distillation") and (model / "chat_template.jinja").is_file():
            yield f"          rapidformer predict --load {run} --chat"
        use = ""
        if (model / "adapter_config.json").is_file():
            user = "CrossEncoder(FOLDER)" if args.task == "reranking" else "other programs"
            use = f"   merges the adapter, for {user}"
        yield f"          rapidformer export {run} FOLDER{use}"
    elif is_model_folder(model):
        yield f'next      load the model with from_pretrained("{model}")'
    else:  # a custom model, which has no configuration
        weights = model / "model.safetensors"
        yield f'next      model.load_state_dict(safetensors.torch.load_file("{weights}"))'
    yield f"          rapidformer plot {run}"
