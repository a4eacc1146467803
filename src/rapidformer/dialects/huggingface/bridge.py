"""From a ``Trainer``'s methods to the one loop: a template whose hooks are the trainer's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.finding import find_checkpoint
from rapidformer.data.loader import DistributedLoader
from rapidformer.dialects.huggingface.interface import TrainerInterface
from rapidformer.dialects.huggingface.loop_events import LoopEvents, forget_requests
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import CheckpointError
from rapidformer.training.evaluation import Evaluation
from rapidformer.training.finetuner import to_metrics
from rapidformer.training.progress import Progress
from rapidformer.training.run_folder import set_aside
from rapidformer.training.template import Template


class TrainerTemplate(Template):
    """Data, optimizer, forward step and evaluation are the trainer's."""

    def __init__(self, trainer: TrainerInterface, engine: RapidformerEngine) -> None:
        super().__init__(engine)
        self.trainer = trainer
        self.processor = trainer.processing_class
        self.callbacks = [LoopEvents(trainer)]

    @property
    def is_shuffled(self) -> bool:
        return self.args.dataloader_type != "single"

    def get_datasets(self) -> tuple[Any, Any, Any, Any]:
        trainer = self.trainer
        return trainer.train_dataset, trainer.eval_dataset, None, trainer.data_collator

    def build_eval_loader(self, dataset: Any, collate: Any) -> DistributedLoader | None:
        return None  # made for each evaluation, as the trainer's hook says

    def make_evaluation(self, model: Any, eval_loader: Any) -> Evaluation | None:
        if self.trainer.eval_dataset is None:
            return None
        name, greater = self.choose_best_metric()
        return Evaluation(
            run=self._evaluate,
            best_metric=name,
            greater_is_better=greater,
        )

    def _evaluate(self) -> dict[str, float]:
        forget_requests(self.trainer.control)
        return to_metrics(self.trainer.evaluate_in_training())

    def run_training(self) -> Progress:
        """The order of a run: folder, data, model, evaluation, loop."""
        with self.holding_folder():
            return self._run_training()

    def _run_training(self) -> Progress:
        trainer = self.trainer
        if self.args.save is not None and self.args.load is None and not self.args.overwrite:
            set_aside(Path(self.args.save), is_main=self.engine.is_main)
        resume = self.find_resume_folder()
        if trainer.train_dataloader is None:
            self.prepare()
        return self.run_loop(
            trainer.train_dataloader,
            trainer.model,
            evaluation=self.make_evaluation(trainer.model, None),
            eval_data=trainer.eval_dataset,
            resume=resume,
        )

    def prepare(self) -> None:
        """Make the training loader, then switch the model on with its optimizer and schedule."""
        loader = self.trainer.get_train_dataloader()
        self.trainer.train_dataloader = self.engine.data.adopt_loader(loader, is_training=True)
        self.compose()

    def compose(self) -> Any:
        trainer = self.trainer
        self.engine.updates.is_own_loop = False
        optimizer, scheduler, make_scheduler = trainer.choose_optimizer()
        # The trainer honours its arguments itself, also where it makes the optimizer from them.
        self.engine.updates.has_own_parts = False
        self.engine.model.skips_cache = not trainer.args.use_cache
        composed = self.engine.compose(
            trainer.model, optimizer, make_scheduler, lr_scheduler=scheduler
        )
        _, trainer.optimizer, trainer.lr_scheduler = composed[:3]
        return trainer.model

    def run_forward_step(self, batch_or_iterator: Any, model: Any) -> Any:
        return self.trainer.run_training_step(model, batch_or_iterator)

    def list_steps(self) -> list[Callable[..., Any]]:
        trainer: Any = self.trainer
        given = [trainer.compute_loss_func] if trainer.compute_loss_func is not None else []
        return [trainer.training_step, trainer.compute_loss, *given]


def find_checkpoint_folder(given: str | bool | Path | None, output_dir: str | None) -> Path | None:
    """What ``resume_from_checkpoint`` means: True is the newest one in the output folder."""
    if given is None or given is False or given == "":
        return None
    is_newest = given is True or str(given).lower() == "true"
    source = Path(output_dir or ".") if is_newest else Path(str(given)).expanduser()
    found = find_checkpoint(source.resolve()) if source.is_dir() else None
    if found is None:
        raise CheckpointError(
            f"resume_from_checkpoint={given!r}: {source} holds no checkpoint (iter_… folders). "
            "Checkpoints of transformers' own Trainer cannot be resumed: start from their weights "
            "with from_pretrained()."
        )
    return found
