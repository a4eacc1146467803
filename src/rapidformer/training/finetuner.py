"""``Finetuner``: four hooks fine-tune a model and evaluate it after each epoch.

class MyFinetuner(Finetuner):
    def train_valid_test_datasets_provider(self): ...
    def model_optimizer_lr_scheduler_provider(self): ...
    def run_forward_step(self, batch, model): ...
    def run_compute_metrics(self, model, eval_dataloader): ...

MyFinetuner(engine=RapidformerEngine()).train()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rapidformer.data.loader import DistributedLoader
from rapidformer.errors import RapidformerError
from rapidformer.training.evaluation import Evaluation
from rapidformer.training.template import Template, _missing_hook, unpack_datasets


class Finetuner(Template):
    """Template for fine-tuning."""

    saves_each_epoch = True

    @property
    def is_shuffled(self) -> bool:
        return self.args.dataloader_type != "single"

    def train_valid_test_datasets_provider(self) -> tuple[Any, Any, Any, Any]:
        """Hook: ``(train, validation, test, collate function or None)``."""
        raise _missing_hook(self, "train_valid_test_datasets_provider")

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
        """Hook: a dictionary of metrics; ``model`` comes as a list of one."""
        raise _missing_hook(self, "run_compute_metrics")

    def finetune(self) -> dict[str, float]:
        """The same as ``train``."""
        return self.train()

    def build_eval_loader(self, dataset: Any, collate: Any) -> DistributedLoader | None:
        """A loader that yields every example once, in order; None without data."""
        if dataset is None:
            return None
        return self.engine.data.build_loader(
            dataset, collate, shuffle=False, batch_size=self.args.eval_micro_batch_size,
            is_training=False,
        )  # fmt: skip

    def get_datasets(self) -> tuple[Any, Any, Any, Any]:
        return unpack_datasets(self.train_valid_test_datasets_provider())

    def make_evaluation(self, model: Any, loader: DistributedLoader | None) -> Evaluation | None:
        has_hook = type(self).run_compute_metrics is not Finetuner.run_compute_metrics
        if loader is None or not has_hook:
            return None
        return self.plan_evaluation(lambda: to_metrics(self.run_compute_metrics([model], loader)))


def to_metrics(returned: Any) -> dict[str, float]:
    """The result of a metrics hook, as numbers by name."""
    if returned is None:
        return {}
    if isinstance(returned, Mapping):
        numbers = {str(name): value for name, value in returned.items() if _is_number(value)}
        return {name.removeprefix("eval_"): float(value) for name, value in numbers.items()}
    if _is_number(returned):
        return {"metric": float(returned)}
    raise RapidformerError(
        f"run_compute_metrics must return a dictionary of numbers, got {type(returned).__name__}."
    )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
