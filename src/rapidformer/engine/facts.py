"""What a checkpoint holds, and what a resumed run should share: differences are said."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import nn

from rapidformer.checkpoint.state import TrainingState, bypass_clock
from rapidformer.config import Settings
from rapidformer.data.loader import DistributedLoader
from rapidformer.engine.data import RunData
from rapidformer.engine.model import RunModel
from rapidformer.engine.runtime import Runtime
from rapidformer.engine.updates import Updates
from rapidformer.log import get_logger
from rapidformer.models.towers import get_text_config

_DATA = ("data_path", "data_name", "data_dir", "train_data", "train_data_path")
_REPEATS = "some samples of this epoch are repeated, and others are left out"
_MOVED = "the position in the old data is used in the new"
_EFFECTS = {
    "seed": "dropout masks and new layers' weights would have been others",
    "data seed": f"the samples come in another order, so {_REPEATS}",
    "order": _REPEATS,
    **dict.fromkeys(("samples", "data", "data content"), _MOVED),
    "split": "training takes other parts of the data",
    "sequence length": "samples are cut differently from here on",
    "attention heads": "the same weights compute something else",
    "global batch": "the very next sample follows, and the learning rate with the samples seen",
}


def collect_state(
    runtime: Runtime, data: RunData, model: RunModel, updates: Updates
) -> TrainingState:
    """The state of all parts, for a checkpoint."""
    parallelized, clock = model.parallelized, updates.clock
    optimizer: Any = updates.optimizer  # None if only weights are loaded
    return TrainingState(
        model=parallelized.model, optimizer=optimizer, scheduler=updates.lr_scheduler,
        scaler=updates.scaler, loader=data.train_loader, step=clock.updates,
        device=runtime.device, topology=runtime.topology,
        bypass=functools.partial(bypass_clock, clock),
        gathered=parallelized.deepspeed.state if parallelized.deepspeed else None,
        facts=_describe_facts(data.args, data.train_loader, parallelized.model),
        base=model.adapter.base if model.adapter else None,
    )  # fmt: skip


def _describe_facts(
    args: Settings, loader: DistributedLoader | None, model: nn.Module
) -> dict[str, Any]:
    """The facts of the current run; small, and written into every checkpoint."""
    config = get_text_config(getattr(model, "config", None))
    # The data as the user named it, without folders: it may lie elsewhere by now.
    values = [getattr(args, name) for name in _DATA]
    words = [w for value in values for w in (value if isinstance(value, list) else [value]) if w]
    facts: dict[str, Any] = {
        "seed": args.seed,
        "data": " ".join(Path(str(word)).name for word in words) or None,
        "split": args.split,
        "sequence length": args.seq_length,
        "attention heads": getattr(config, "num_attention_heads", args.num_attention_heads),
    }
    if loader is not None:
        facts["order"] = loader.describe_order()
        facts["global batch"] = loader.samples_per_update
        facts["data content"] = loader.source.fingerprint
        if loader.is_shuffled:
            facts["data seed"] = loader.seed
        if not loader.is_stream:
            facts["samples"] = loader.num_samples
    return {name: value for name, value in facts.items() if value is not None}


def report_differences(saved: dict[str, Any], current: dict[str, Any], source: Path) -> None:
    """Log a sentence for each fact that differs; facts that only one side knows are left out."""
    differences = [
        f"\n  - {name} {current[name]} (was {saved[name]}): {effect}."
        for name, effect in _EFFECTS.items()
        if name in saved and name in current and saved[name] != current[name]
    ]
    if differences:
        get_logger().warning(
            f"resumed with other settings than {source} was saved with:{''.join(differences)}"
        )
