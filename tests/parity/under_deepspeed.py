"""What training under DeepSpeed has of its own: a file, and gradients that are in no parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rapidformer.accel.deepspeed.state import join_tensor_split
from rapidformer.engine import RapidformerEngine
from rapidformer.optim.observer import get_observer
from rapidformer.verification.recorder import Recorder
from rapidformer.verification.trace import Tensors, Trace
from tests.parity.harness import Case, Training
from tests.parity.limits import ALL, FIRST, Limits

LIMITS = Limits({**ALL, "updated weights": 1e-6}, FIRST)


def build_case(
    model: str, content: dict[str, Any], folder: Path, rows: int = 12, **settings: Any
) -> Case:
    """A small model, with accumulation, under a DeepSpeed file of this content."""
    path = folder / f"{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    training = Training(
        f"small-{model}", make_optimizer=make_grouped_sgd, rows=rows, clip_grad=0.5,
        is_shuffled=True, run_epoch=run_epoch,
        recorder=DeepSpeedRecorder,
    )  # fmt: skip
    return training, {"deepspeed": str(path), **settings}


def make_grouped_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, momentum, and weight decay in one of them."""
    return torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1]},
        ],
        lr=0.1,
        momentum=0.9,
    )


def run_epoch(engine: RapidformerEngine, model: Any, loader: Any) -> None:
    for update in engine.data.iterate_updates(loader):
        engine.run_update(lambda batch: model(**batch)["loss"], update)
        get_observer().see_gradients()  # DeepSpeed finishes them, and tells nobody
        engine.step()


class DeepSpeedRecorder(Recorder):
    """As the library's; tensors are whole on the first process, and a tied weight has one name."""

    def after_compose(self, engine: Any) -> None:
        super().after_compose(engine)
        self.trace.start = self._collect_weights()

    def see_gradients(self) -> None:
        super().see_gradients()
        self.trace.gradients[-1] = self._collect_gradients()

    def finish(self) -> Trace:
        super().finish()
        self.trace.weights = self._collect_weights()
        return self.trace

    def _collect_gradients(self) -> Tensors:
        """What the coming update uses: before DeepSpeed's own division it is a sum."""
        from deepspeed.utils import safe_get_full_grad

        strategy = self._engine.model.parallelized.deepspeed
        divisor = strategy.engine.optimizer.external_loss_scale if strategy.stage else 1.0
        gradients = {}
        for name, parameter in strategy.model.named_parameters():
            gradient = safe_get_full_grad(parameter)
            if gradient is not None:
                gradients[name] = join_tensor_split(parameter, gradient) / divisor
        return self._name_all(gradients)

    def _collect_weights(self) -> Tensors:
        strategy = self._engine.model.parallelized.deepspeed
        if strategy.state is not None:
            return self._name_all(strategy.state.gather_weights())
        return self._name_all(dict(strategy.model.named_parameters()))

    def _name_all(self, tensors: dict[str, torch.Tensor]) -> Tensors:
        """Under each of their names, as the library records them."""
        found = {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}
        for first, *others in self.trace.ties:
            if first in found:
                found |= dict.fromkeys(others, found[first])
        return found
