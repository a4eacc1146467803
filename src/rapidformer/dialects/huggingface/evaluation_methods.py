"""``Trainer.evaluate`` and ``Trainer.predict``, and what a subclass may override of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, speed_metrics

from rapidformer.dialects.huggingface.evaluating import choose_outputs, run_evaluation
from rapidformer.dialects.huggingface.loss import call_with_count, count_labels
from rapidformer.dialects.huggingface.records import RunRecords
from rapidformer.training.evaluation import evaluate_model
from rapidformer.training.regularization import regularize

Inputs = dict[str, Any]
Metrics = dict[str, Any]


class EvaluationMethods(RunRecords):
    """The part of ``Trainer`` that evaluates and predicts."""

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Metrics:
        """The loss and ``compute_metrics`` on evaluation data; several data sets by name."""
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(dataset, Mapping):
            found: Metrics = {}
            for name, each in dataset.items():
                prefix = f"{metric_key_prefix}_{name}"
                found |= self.evaluate(each, ignore_keys, metric_key_prefix=prefix)
            return found
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
        self.log(dict(metrics))
        self.callbacks.call("on_evaluate", metrics=metrics, eval_dataloader=loader)
        self._log_line(metrics, "evaluation")
        return metrics

    def evaluate_in_training(self) -> Metrics:
        """The loop's evaluation; how fast it was is not a metric."""
        metrics = self.evaluate(ignore_keys=self._ignore_keys)
        speed = ("_runtime", "_per_second")
        return {name: value for name, value in metrics.items() if not name.endswith(speed)}

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Predictions, labels and metrics, in the order of the data."""
        started, loader = time.time(), self.get_test_dataloader(test_dataset)
        output = self.evaluation_loop(
            loader,
            "Prediction",
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        metrics = self._add_speed(output, metric_key_prefix, started)
        self.callbacks.call("on_predict", metrics=metrics, eval_dataloader=loader)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Predict a loader's data without gradients and dropout."""
        loss_only = self.args.prediction_loss_only
        if prediction_loss_only is not None:
            loss_only = prediction_loss_only
        loader = self.engine.data.adopt_loader(dataloader, is_training=False)
        outputs: list[EvalLoopOutput] = []

        def run() -> dict[str, float]:
            outputs.append(
                run_evaluation(
                    self,
                    loader,
                    loss_only=loss_only,
                    ignore_keys=ignore_keys,
                    prefix=metric_key_prefix,
                )
            )
            return {}

        if self._is_training and not self.model.training:
            run()  # the loop's own evaluation
        else:
            # A run of training has regularized the model already.
            applied = (
                nullcontext() if self._is_training else regularize(self.model, self.engine.args)
            )
            with applied:
                evaluate_model(self.engine, run)
        return outputs[0]

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Inputs,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Loss, logits and labels of one batch, each of them or None."""
        names = self.label_names
        has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
        labels = tuple(inputs[name] for name in names) if has_labels else None
        if ignore_keys is None:
            config = getattr(model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        loss = None
        with torch.no_grad():
            if has_labels:
                count = count_labels(model, inputs)
                compute = partial(self.compute_loss, return_outputs=True)
                loss, outputs = call_with_count(compute, model, inputs, count=count)
                loss = loss.detach().mean()
            else:
                outputs = model(**inputs)
        if prediction_loss_only:
            return loss, None, None
        logits = choose_outputs(outputs, ignore_keys or [], has_loss=has_labels)
        return loss, logits, labels[0] if labels and len(labels) == 1 else labels

    def _add_speed(self, output: EvalLoopOutput, prefix: str, started: float) -> Metrics:
        batch, samples = self.args.eval_batch_size * self.args.world_size, output.num_samples or 0
        speed = speed_metrics(prefix, started, num_samples=samples, num_steps=-(-samples // batch))
        metrics: Metrics = {**(output.metrics or {}), **speed}
        return metrics
