"""Names of transformers' ``Trainer`` that overridden methods copy from its source."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from rapidformer.dialects.huggingface.interface import TrainerInterface
from rapidformer.errors import RapidformerError


class FamiliarNames(TrainerInterface):
    """What these names mean here; none of them needs to be overridden."""

    label_smoother = None
    """The loop smooths labels itself (``label_smoothing_factor``)."""
    current_gradient_accumulation_steps = 1
    """Do not divide the loss of a micro-batch: the loop weights each by its labels."""
    model_accepts_loss_kwargs = False

    @property
    def model_wrapped(self) -> nn.Module:
        """The model: nothing is ever wrapped."""
        return self.model

    @property
    def is_in_train(self) -> bool:
        return self._is_training

    def num_examples(self, dataloader: Any) -> int:
        """The rows of a loader's data."""
        found = getattr(dataloader, "num_samples", None)
        return int(found) if found is not None else len(dataloader.dataset)

    def get_num_trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def get_total_train_batch_size(self, args: Any = None) -> int:
        """Rows per optimizer step, over all processes."""
        return int(self.engine.args.global_batch_size or 0)

    def get_learning_rates(self) -> list[float]:
        """Of each parameter group."""
        return [float(group["lr"]) for group in self._get_groups()]

    def get_optimizer_group(self, param: nn.Parameter | None = None) -> Any:
        """The group that holds a parameter, or the parameters of all groups."""
        groups = self._get_groups()
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(p is param for p in group["params"])), None)

    def _get_groups(self) -> list[dict[str, Any]]:
        if self.optimizer is None:
            raise RapidformerError("the Trainer has no optimizer yet: call train() first.")
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager[None]:
        """The model runs in the precision of the run by itself."""
        return nullcontext()

    def floating_point_ops(self, inputs: Any) -> int:
        """transformers' estimate, if the model has one."""
        count = getattr(self.model, "floating_point_ops", None)
        return int(count(inputs)) if count is not None else 0

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Batches are on the device already."""
        return inputs

    def compute_loss_context_manager(self) -> AbstractContextManager[None]:
        """The model runs in the precision of the run by itself."""
        return nullcontext()
