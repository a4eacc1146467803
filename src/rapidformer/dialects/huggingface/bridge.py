"""From a ``Trainer`` to the one loop: a template whose hooks are the trainer's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rapidformer.compat.patches import Change
from rapidformer.data.loader import DistributedLoader
from rapidformer.dialects.huggingface.data_methods import adopt_loader
from rapidformer.dialects.huggingface.evaluating import EvaluationMethods
from rapidformer.dialects.huggingface.events import REQUESTS, LoopEvents
from rapidformer.engine import RapidformerEngine
from rapidformer.objectives import BoundObjective, Objective
from rapidformer.training.evaluation import Evaluation, Progress
from rapidformer.training.finetuner import to_metrics
from rapidformer.training.run_folder import set_aside
from rapidformer.training.template import Template


def _set_matmul_precision(name: str) -> Callable[[], object]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    return functools.partial(torch.set_float32_matmul_precision, before)


_TF32 = {
    is_used: Change(functools.partial(_set_matmul_precision, name))
    for is_used, name in ((True, "high"), (False, "highest"))
}
"""A setting of the whole process: a trainer's for as long as its engine is open."""


class TrainerTemplate(Template):
    """Data, optimizer, forward step and evaluation are the trainer's."""

    def __init__(self, trainer: EvaluationMethods, engine: RapidformerEngine) -> None:
        super().__init__(engine)
        self.trainer = trainer
        self.processor = trainer.saved_processor
        self._events = LoopEvents(trainer)
        self.callbacks = [self._events]
        self.smooths_labels = trainer.smooths_labels

    @property
    def is_shuffled(self) -> bool:
        return self.args.dataloader_type != "single"

    def get_datasets(self) -> tuple[Any, Any, Any, Any]:
        trainer = self.trainer
        return trainer.train_dataset, trainer.eval_dataset, None, trainer.data_collator

    def build_eval_loader(self, dataset: Any, collate: Any) -> DistributedLoader | None:
        return None  # made for each evaluation, as the trainer's hook says

    def make_evaluation(self, model: Any, loader: Any) -> Evaluation | None:
        if self.trainer.eval_dataset is None:
            return None
        return self.plan_evaluation(self._evaluate)

    def _evaluate(self) -> dict[str, float]:
        # Before `evaluate` calls the callbacks: what the loop has planned is not their wish.
        for name in REQUESTS[1:]:
            setattr(self.trainer.control, name, False)
        return to_metrics(self.trainer.evaluate_in_training())

    def run_training(self) -> Progress:
        """The order of a run: folder, data, model, evaluation, loop."""
        trainer, args = self.trainer, self.args
        with self.holding_folder():
            if args.save is not None and args.load is None and not args.overwrite:
                set_aside(Path(args.save))
            resume = self.find_resume_folder()
            if trainer.train_dataloader is None:
                self.prepare()
            trainer.model.zero_grad()  # of steps by hand
            evaluation = self.make_evaluation(trainer.model, None)
            progress = self.run_loop(
                trainer.train_dataloader, trainer.model,
                evaluation=evaluation, eval_data=trainer.eval_dataset, resume=resume,
            )  # fmt: skip
            if not self._events.has_begun:  # the run was complete
                self._events.recall(self.engine.updates.clock.updates, args.save)
            return progress

    def prepare(self) -> None:
        """Make the training loader, then switch the model on with its optimizer and schedule."""
        with self.trainer.accelerator.leaving_loaders():
            loader = self.trainer.get_train_dataloader()
        self.trainer.train_dataloader = adopt_loader(self.engine, loader, is_training=True)
        self.compose()

    def compose(self) -> Any:
        trainer = self.trainer
        self.engine.updates.is_own_loop = False
        # The trainer honours its arguments itself, also where it makes the optimizer from them.
        self.engine.updates.has_own_parts = False
        # Its own way to save a model is part of each checkpoint.
        self.engine.checkpoints.holds_model = not trainer.overrides("save_model")
        self.engine.model.skips_cache = not trainer.args.use_cache
        self.frozen_models.before_compose()
        trainer.compose(self.engine)
        if trainer.args.tf32 is not None:
            self.engine.model.parallelized.applied.enter(_TF32[trainer.args.tf32])
        return trainer.model

    def build_objective(self) -> Objective:
        return self.trainer.build_objective() or super().build_objective()

    def provide_frozen_models(self) -> Mapping[str, nn.Module]:
        return self.trainer.provide_frozen_models()

    def make_forward(self, model: Any) -> BoundObjective:
        forward = super().make_forward(model)
        self.trainer.context = forward.context
        return forward

    def run_forward_step(self, batch_or_iterator: Any, model: Any) -> Any:
        return self.trainer.run_training_step(model, batch_or_iterator)

    def list_steps(self) -> list[Callable[..., Any]]:
        trainer: Any = self.trainer
        user_loss = [trainer.compute_loss_func] if trainer.compute_loss_func is not None else []
        counts = [trainer.count_work] if trainer.overrides("floating_point_ops") else []
        steps = [trainer.run_training_step, trainer.training_step, trainer.compute_loss]
        return [*steps, *user_loss, *counts]
