"""``Trainer.evaluate`` and ``Trainer.predict``: one pass over data, each row once, in order."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import EvalPrediction
from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size
from transformers.trainer_utils import (
    EvalLoopOutput,
    PredictionOutput,
    denumpify_detensorize,
    speed_metrics,
)

from rapidformer.data.batch import IGNORED_LABEL
from rapidformer.data.nested import map_tensors
from rapidformer.dialects.huggingface.data_methods import (
    DataMethods,
    adopt_loader,
    has_loss_without_labels,
)
from rapidformer.dialects.huggingface.interface import Inputs, Keys, Metrics, Prediction
from rapidformer.dialects.huggingface.loss import call_with_count, count_labels
from rapidformer.dialects.huggingface.records import RunRecords
from rapidformer.dist.attendance import attending
from rapidformer.engine import RapidformerEngine
from rapidformer.engine.evaluation import run_batches
from rapidformer.models.adapters import get_inner
from rapidformer.training.regularization import regularize


def run_evaluation(
    trainer: EvaluationMethods, loader: Any, *, loss_only: bool, ignore_keys: Keys, prefix: str
) -> EvalLoopOutput:
    """Predict all of the loader's data; metrics are named with the prefix."""
    args, engine, model = trainer.args, trainer.engine, trainer.model
    wants = set(args.include_for_metrics)
    kept: dict[str, EvalLoopContainer] = {}
    samples = 0
    means = torch.zeros(0, 2, dtype=torch.float64)
    metrics: dict[str, Any] | None = None

    def step(batch: Any) -> Any:
        inputs: Any = copy.copy(batch) if isinstance(batch, Mapping) else batch
        return trainer.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)

    results = run_batches(loader, step)
    result = next(results, None)
    while result is not None:
        batch, (loss, logits, labels) = result[0].batch, result[1]
        rows = find_batch_size(batch) or 1
        parts: dict[str, Any] = {}
        if loss is not None:
            # What the loss of this batch is a mean over: its labels, or its rows.
            marks = batch.get("labels") if isinstance(batch, Mapping) else None
            is_sequence = isinstance(marks, torch.Tensor) and marks.dim() > 1
            weight = count_labels(model, batch) if is_sequence else rows
            means = torch.cat([means, _gather_mean(engine, loss, weight)])
            if "loss" in wants:
                parts["losses"] = _gather(engine, loss.detach().mean().repeat(rows))
        if logits is not None:
            if trainer.preprocess_logits_for_metrics is not None:
                logits = trainer.preprocess_logits_for_metrics(logits, labels)
            parts["predictions"] = _gather(engine, logits)
        if labels is not None:
            parts["label_ids"] = _gather(engine, labels)
        if "inputs" in wants:
            name = getattr(model, "main_input_name", "input_ids")
            parts["inputs"] = _gather(engine, batch[name])
        trainer.callbacks.call("on_prediction_step", eval_dataloader=loader)
        # Looked at only now: what was gathered belongs to the batch that the loader gave last.
        result = next(results, None)
        if args.batch_eval_metrics and trainer.compute_metrics and "label_ids" in parts:
            metrics = trainer.compute_metrics(_predict(parts), compute_result=result is None)
            if prefix != "test":
                continue
        for name, value in parts.items():
            kept.setdefault(name, EvalLoopContainer(args.eval_do_concat_batches)).add(value)
        samples += find_batch_size(parts) or 0
    arrays = {name: container.get_arrays() for name, container in kept.items()}
    is_complete = arrays.keys() >= {"predictions", "label_ids"}
    if trainer.compute_metrics and is_complete and not args.batch_eval_metrics:
        metrics = trainer.compute_metrics(_predict(arrays))
    named = denumpify_detensorize(dict(metrics or {}))
    if len(means):
        losses, weights = means[means[:, 1] > 0].unbind(1)  # a mean over no labels is NaN
        named["loss"] = float((losses * weights).sum() / weights.sum())
    named = {k if k.startswith(f"{prefix}_") else f"{prefix}_{k}": v for k, v in named.items()}
    return EvalLoopOutput(
        predictions=arrays.get("predictions"),
        label_ids=arrays.get("label_ids"),
        metrics=named,
        num_samples=samples or int(getattr(loader, "num_samples", 0)),
    )


def _predict(parts: dict[str, Any]) -> EvalPrediction:
    inputs, losses = parts.get("inputs"), parts.get("losses")
    return EvalPrediction(parts["predictions"], parts["label_ids"], inputs=inputs, losses=losses)


def _gather(engine: RapidformerEngine, value: Any) -> Any:
    """Every rank's rows of each tensor in a nested value."""
    return map_tensors(
        value, lambda _, tensor: engine.gather(tensor, pad_value=IGNORED_LABEL).cpu()
    )


def _gather_mean(engine: RapidformerEngine, loss: torch.Tensor, weight: Any) -> torch.Tensor:
    """A row of loss and weight for each process that had examples of its own in this round."""
    pair = [loss.detach().mean().double(), torch.as_tensor(weight, device=loss.device).double()]
    return engine.gather(torch.stack(pair).reshape(1, 2)).cpu()


def choose_outputs(outputs: Any, ignore_keys: list[str], *, has_loss: bool) -> Any:
    """The model's outputs without its loss and what is not asked for; one alone is not a tuple."""
    if isinstance(outputs, Mapping):
        skipped = {*ignore_keys, "loss"} if has_loss else set(ignore_keys)
        kept: Any = tuple(v for k, v in outputs.items() if k not in skipped)
    else:
        kept = tuple(outputs[1:]) if has_loss else outputs
    return kept[0] if isinstance(kept, tuple) and len(kept) == 1 else kept


class EvaluationMethods(RunRecords, DataMethods):
    """The part of ``Trainer`` that evaluates and predicts."""

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Keys = None, metric_key_prefix: str = "eval"
    ) -> Metrics:
        """The loss and ``compute_metrics`` on evaluation data; several data sets by name."""
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(dataset, Mapping):
            joined: Metrics = {}
            for name, part in dataset.items():
                prefix = f"{metric_key_prefix}_{name}"
                joined |= self.evaluate(part, ignore_keys, metric_key_prefix=prefix)
            return joined
        started, loader = time.time(), self.get_eval_dataloader(eval_dataset)
        output = self.evaluation_loop(
            loader,
            "Evaluation",
            # Without metrics, nothing reads the predictions.
            prediction_loss_only=True if self.compute_metrics is None else None,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        metrics = self._add_speed(output, metric_key_prefix, started)
        self.log(metrics)
        self.callbacks.call("on_evaluate", metrics=metrics, eval_dataloader=loader)
        self._log_line(metrics, "evaluation")
        return metrics

    def evaluate_in_training(self) -> Metrics:
        """The loop's evaluation; how fast it was is not a metric."""
        metrics = self.evaluate(ignore_keys=self._ignore_keys)
        speed = ("_runtime", "_per_second", "epoch")
        return {name: value for name, value in metrics.items() if not name.endswith(speed)}

    def predict(
        self, test_dataset: Any, ignore_keys: Keys = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions, labels and metrics, in the order of the data."""
        started, loader = time.time(), self.get_test_dataloader(test_dataset)
        output = self.evaluation_loop(
            loader, "Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
        )
        metrics = self._add_speed(output, metric_key_prefix, started)
        self.callbacks.call("on_predict", metrics=metrics, eval_dataloader=loader)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Keys = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Predict a loader's data without gradients and dropout."""
        asked = prediction_loss_only
        loss_only = self.args.prediction_loss_only if asked is None else asked
        loader = adopt_loader(self.engine, dataloader, is_training=False)
        # A habit is to call it on the first process alone, which would wait for the others.
        method = "predict()" if description == "Prediction" else "evaluate()"
        with attending(method, needs_all="each of them predicts a part of the rows"):
            pass
        with ExitStack() as stack:
            if not self._is_training:
                # A run of training has regularized the model already.
                stack.enter_context(regularize(self.model, self.engine.args))
            stack.enter_context(self._evaluating())
            output = run_evaluation(
                self, loader, loss_only=loss_only, ignore_keys=ignore_keys, prefix=metric_key_prefix
            )
        if not self._is_training:
            self.model.eval()  # scripts call the model next, and want no dropout
        return output

    def _evaluating(self) -> AbstractContextManager[None]:
        """The model in evaluation mode, as it already is in the loop's own evaluations."""
        is_already = self._is_training and not self.model.training
        return nullcontext() if is_already else self.engine.model.evaluating()

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: Keys = None
    ) -> Prediction:
        """Loss, logits and labels of one batch, each of them or None."""
        inputs, names = self._prepare_inputs(inputs), self.label_names
        has_loss = not names and has_loss_without_labels(get_inner(model), inputs)
        has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
        labels = tuple(inputs[name] for name in names) if has_labels else None
        if ignore_keys is None:
            config = getattr(model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        loss = None
        with torch.no_grad(), self.compute_loss_context_manager():
            if has_labels or has_loss:
                count = count_labels(model, inputs)
                compute = partial(self.compute_loss, return_outputs=True)
                loss, outputs = call_with_count(compute, model, inputs, count=count)
                loss = loss.detach().mean()
            else:
                outputs = model(**inputs)
        if prediction_loss_only:
            return loss, None, None
        logits = choose_outputs(outputs, ignore_keys or [], has_loss=loss is not None)
        return loss, logits, labels[0] if labels and len(labels) == 1 else labels

    def _add_speed(self, output: EvalLoopOutput, prefix: str, started: float) -> Metrics:
        batch, samples = self.args.eval_batch_size * self.args.world_size, output.num_samples or 0
        speed = speed_metrics(prefix, started, num_samples=samples, num_steps=-(-samples // batch))
        return {**(output.metrics or {}), **speed}
