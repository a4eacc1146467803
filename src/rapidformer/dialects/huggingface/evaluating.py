"""One pass over evaluation data: predictions, labels and the exact mean loss, each example once.

Every round is gathered over the processes, so what ``compute_metrics`` gets is in the order of the
data on any number of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_concat, nested_numpify
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from rapidformer.data.nested import map_tensors
from rapidformer.dialects.huggingface.interface import TrainerInterface
from rapidformer.engine import RapidformerEngine
from rapidformer.engine.evaluation import run_batches
from rapidformer.models.own_loss import shifts_labels

_PADDING = -100


def run_evaluation(
    trainer: TrainerInterface,
    loader: Any,
    *,
    loss_only: bool,
    ignore_keys: list[str] | None,
    prefix: str,
) -> EvalLoopOutput:
    """Predict all of the loader's data; metrics are named with the prefix."""
    args, engine, model = trainer.args, trainer.engine, trainer.model
    wants = set(args.include_for_metrics)
    kept = _Kept(joins=args.eval_do_concat_batches)
    means = torch.zeros(0, 2, dtype=torch.float64)
    metrics: dict[str, Any] | None = None

    def step(batch: Any) -> Any:
        inputs = dict(batch) if isinstance(batch, Mapping) else batch
        return trainer.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)

    results = run_batches(loader, step)
    result = next(results, None)
    while result is not None:
        batch, (loss, logits, labels) = result[0].batch, result[1]
        rows = _count_rows(batch)
        found: dict[str, Any] = {"predictions": None, "label_ids": None, "losses": None}
        if loss is not None:
            means = torch.cat([means, _gather_mean(engine, loss, _weigh(trainer, batch, rows))])
            if "loss" in wants:
                found["losses"] = _gather(engine, loss.detach().mean().repeat(rows))
        if logits is not None:
            if trainer.preprocess_logits_for_metrics is not None:
                logits = trainer.preprocess_logits_for_metrics(logits, labels)
            found["predictions"] = _gather(engine, logits)
        if labels is not None:
            found["label_ids"] = _gather(engine, labels)
        if "inputs" in wants:
            name = getattr(model, "main_input_name", "input_ids")
            found["inputs"] = _gather(engine, batch[name])
        found = {name: nested_numpify(value) for name, value in found.items() if value is not None}
        trainer.callbacks.on_prediction_step(loader)
        # Looked at only now: what was gathered belongs to the batch that the loader gave last.
        result = next(results, None)
        if args.batch_eval_metrics and trainer.compute_metrics and "label_ids" in found:
            metrics = trainer.compute_metrics(_predict(found), compute_result=result is None)
            if prefix != "test":
                continue
        kept.add(found)
    is_complete = kept.has("predictions") and kept.has("label_ids")
    if trainer.compute_metrics and is_complete and not args.batch_eval_metrics:
        metrics = trainer.compute_metrics(_predict(kept.values))
    named = denumpify_detensorize(dict(metrics or {}))
    if len(means):
        losses, weights = means.unbind(1)
        named["loss"] = float((losses * weights).sum() / weights.sum())
    named = {k if k.startswith(f"{prefix}_") else f"{prefix}_{k}": v for k, v in named.items()}
    return EvalLoopOutput(
        predictions=kept.values.get("predictions"),  # type: ignore[arg-type]
        label_ids=kept.values.get("label_ids"),
        metrics=named,
        num_samples=kept.rows or int(getattr(loader, "num_samples", 0)),
    )


class _Kept:
    """What the batches gave, joined on the host (or kept as a list of batches)."""

    def __init__(self, *, joins: bool) -> None:
        self.values: dict[str, Any] = {}
        self.rows = 0
        self._joins = joins

    def add(self, found: dict[str, Any]) -> None:
        for name, value in found.items():
            if not self._joins:
                self.values.setdefault(name, []).append(value)
            elif name in self.values:
                self.values[name] = nested_concat(self.values[name], value, padding_index=_PADDING)
            else:
                self.values[name] = value
        first = next(iter(found.values()), None)
        self.rows += _count_nested_rows(first)

    def has(self, name: str) -> bool:
        return name in self.values


def _predict(found: dict[str, Any]) -> EvalPrediction:
    return EvalPrediction(
        predictions=found["predictions"],
        label_ids=found["label_ids"],
        inputs=found.get("inputs"),
        losses=found.get("losses"),
    )


def _gather(engine: RapidformerEngine, value: Any) -> Any:
    """Every rank's rows of each tensor in a nested value."""
    return map_tensors(value, lambda _, each: engine.gather(each, pad_value=_PADDING).cpu())


def _gather_mean(
    engine: RapidformerEngine, loss: torch.Tensor, weight: float | torch.Tensor
) -> torch.Tensor:
    """A row of loss and weight for each process that had examples of its own in this round."""
    pair = [loss.detach().mean().double(), torch.as_tensor(weight, device=loss.device).double()]
    return engine.gather(torch.stack(pair).reshape(1, 2)).cpu()


def _weigh(trainer: TrainerInterface, batch: Any, rows: int) -> float | torch.Tensor:
    """What the loss of this batch is a mean over: its labels, or its rows."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return float(rows)
    counted = labels[..., 1:] if shifts_labels(trainer.model) else labels
    return counted.ne(_PADDING).sum()


def _count_rows(batch: Any) -> int:
    values = batch.values() if isinstance(batch, Mapping) else batch
    return next((len(v) for v in values if isinstance(v, torch.Tensor) and v.dim()), 1)


def _count_nested_rows(value: Any) -> int:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return len(value) if isinstance(value, np.ndarray) and value.ndim else 0


def choose_outputs(outputs: Any, ignore_keys: list[str], *, has_loss: bool) -> Any:
    """The model's outputs without its loss and what is not asked for; one alone is not a tuple."""
    if isinstance(outputs, Mapping):
        skipped = {*ignore_keys, "loss"} if has_loss else set(ignore_keys)
        kept: Any = tuple(v for k, v in outputs.items() if k not in skipped)
    else:
        kept = tuple(outputs[1:]) if has_loss else outputs
    return kept[0] if isinstance(kept, tuple) and len(kept) == 1 else kept
