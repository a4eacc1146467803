"""Pre-training as a black box: the PreTrainer that scripts use, from the settings alone."""

from __future__ import annotations

import time
from typing import Any

from rapidformer.context import get_tokenizer
from rapidformer.data.pretraining import build_pretraining_datasets
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import DataError, raise_problems
from rapidformer.objectives import Objective
from rapidformer.tasks.evaluation.evaluating import EvaluationReport
from rapidformer.tasks.pretraining.models import (
    build_model,
    choose_objective,
    count_usable_tokens,
    load_processor,
)
from rapidformer.tasks.rows.preflight import find_missing_length
from rapidformer.training.evaluation import Metrics, evaluate_model
from rapidformer.training.pretrainer import PreTrainer

_SPLITS = {"train": 0, "validation": 1, "valid": 1, "test": 2}


class TaskPreTrainer(PreTrainer):
    """A PreTrainer whose hooks come from an objective."""

    has_shifted_labels = False  # objectives compare each position with its own label

    def __init__(self, engine: RapidformerEngine) -> None:
        super().__init__(engine)
        self.tokenizer = get_tokenizer()
        self.objective = choose_objective(self.args, self.tokenizer)
        self.processor = load_processor(self.args, self.tokenizer)

    def train_valid_test_datasets_provider(self, train_val_test_num_samples: list[int]) -> Any:
        datasets = build_pretraining_datasets(
            self.objective.name, self.args, train_val_test_num_samples, tokenizer=self.tokenizer,
            binary_head=self.objective.has_order_head,
            vocab_size=count_usable_tokens(self.objective),
        )  # fmt: skip
        if train_val_test_num_samples[0] and datasets[0] is None:
            raise DataError(f"--split {self.args.split!r} leaves no training data.")
        return datasets

    def model_optimizer_lr_scheduler_provider(self) -> tuple[Any, Any, Any]:
        return build_model(self.objective), None, None

    def build_objective(self) -> Objective:
        return self.objective


def pretrain(engine: RapidformerEngine) -> Metrics:
    raise_problems(list(find_missing_length(engine.args)))
    return TaskPreTrainer(engine).train()


def evaluate_pretraining(engine: RapidformerEngine) -> EvaluationReport:
    """Loss and perplexity on ``--eval-split``: a run's samples, given its length and intervals."""
    args = engine.args
    split = _SPLITS.get(args.eval_split)
    if split is None:
        raise DataError(f"--eval-split {args.eval_split}: use train, validation or test.")
    trainer = TaskPreTrainer(engine)
    counts = [args.eval_iters * (args.global_batch_size or 1)] * 3
    if engine.data.get_train_iters() is not None:
        counts = trainer.count_samples()
    wanted = [count if number == split else 0 for number, count in enumerate(counts)]
    dataset = trainer.train_valid_test_datasets_provider(wanted)[split]
    loader = trainer.build_eval_loader(dataset, None)
    if loader is None:
        raise DataError(
            f"the corpus has no {args.eval_split} data: --split {args.split!r} leaves none for it."
        )
    model = engine.model.compose_for_evaluation(build_model(trainer.objective))
    started = time.perf_counter()
    metrics = evaluate_model(engine, lambda: trainer.measure_loss(model, loader))
    return EvaluationReport(
        task="pretraining", split=args.eval_split, metrics=metrics, examples=loader.num_samples,
        seconds=round(time.perf_counter() - started, 3),
    )  # fmt: skip
