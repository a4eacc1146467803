"""TRL's trainers on the same model, rows and order, recorded step by step as ours are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tests.tasks.preference_rig import LEARNING_RATE, Recorder

_SHOWN = ("loss", "rewards/", "logps/", "kl", "nll_loss", "log_odds", "accuracy", "margin",
          "mean_reward")  # fmt: skip
# Elsewhere TRL shows means over all logits, those of padding included.
_OF_DPO_AND_KTO = ("logits/", "entropy", "mean_token_accuracy")


class _Watcher(TrainerCallback):  # type: ignore[misc]
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        parameters = more["model"].named_parameters()
        self.recorder.weights.append({name: p.detach().clone() for name, p in parameters})

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if "loss" in more["logs"]:
            self.recorder.lines.append(more["logs"])


def run_theirs(
    kind: str, folder: Path, rows: list[dict[str, Any]], work: Path, *, batch: int, epochs: int = 1,
    **settings: Any,
) -> Recorder:  # fmt: skip
    """``kind`` is the name of the trainer: DPO, CPO, ORPO, KTO or Reward."""
    import trl
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )
    from trl.experimental import cpo, orpo

    rooms = {"CPO": cpo, "ORPO": orpo}
    room = rooms.get(kind, trl)
    auto: Any = AutoModelForSequenceClassification if kind == "Reward" else AutoModelForCausalLM
    config = getattr(room, f"{kind}Config")(
        output_dir=str(work), per_device_train_batch_size=batch, num_train_epochs=epochs,
        optim="sgd", learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=0,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
        disable_tqdm=True, train_sampling_strategy="sequential", gradient_checkpointing=False,
        max_length=64, **settings,
    )  # fmt: skip
    recorder = Recorder()
    trainer = getattr(room, f"{kind}Trainer")(
        model=auto.from_pretrained(folder), args=config, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder), callbacks=[_Watcher(recorder)],
    )  # fmt: skip
    trainer.train()
    return recorder


def compare(ours: Recorder, theirs: Recorder) -> dict[str, float]:
    """The largest difference of losses, metrics and weights after each step.

    What is made of log-probabilities is compared by their size, since it has their round-off.
    """
    assert len(ours.lines) == len(theirs.lines) == len(ours.weights) == len(theirs.weights)
    gaps = {"loss": 0.0, "metrics": 0.0, "weights": 0.0}
    for line, other in zip(ours.lines, theirs.lines, strict=True):
        names = (*_SHOWN, *(_OF_DPO_AND_KTO if "entropy" in other else ()))
        shared = [name for name in line if name in other and name.startswith(names)]
        needed = {n for n in other if n.startswith(("rewards/", "logps/", *names[len(_SHOWN) :]))}
        assert {"loss", *needed} <= {*shared}
        scale = max(1.0, abs(other.get("logps/chosen", 0.0)))
        for name in shared:
            size = max(1.0, abs(other[name])) if name == "loss" else scale
            kind = "loss" if name == "loss" else "metrics"
            gaps[kind] = max(gaps[kind], abs(line[name] - other[name]) / size)
    for weights, others in zip(ours.weights, theirs.weights, strict=True):
        assert weights.keys() == others.keys()
        gap = max(float((weights[name] - others[name]).abs().max()) for name in others)
        gaps["weights"] = max(gaps["weights"], gap)
    moved = max(float((last - ours.weights[0][n]).abs().max()) for n, last in others.items())
    assert moved > 1e-3  # a step is a thousand times as large as what may differ
    return gaps
