"""``--checkpoint-activations`` with objectives that call models more than once per step."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from rapidformer.accel.precision import processor
from tests.tasks.preference_rig import WORDS, make_answers, make_model, make_pairs, run_ours

_LORA = {"lora_rank": 2, "lora_target_modules": "all-linear"}
_ANSWERS = [
    {"prompt": row["prompt"], "response": row["completion"]} for row in make_answers(4, seed=3)
]
_TEXTS = [
    {"anchor": " ".join(WORDS[n : n + 3]), "positive": " ".join(WORDS[n + 1 : 2 * n + 4])}
    for n in range(4)
]


@pytest.fixture
def in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what a pass leaves in context variables is not there in the backward pass."""
    plain: Any = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                plain(self, *args, **kwargs)
            except BaseException as error:
                errors.append(error)

        thread = Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    monkeypatch.setattr(torch.Tensor, "backward", backward)


@pytest.mark.parametrize(
    ("task", "rows", "settings"),
    [
        ("preference", make_pairs(4), {}),
        ("preference", make_pairs(4), _LORA),
        ("preference", make_pairs(4), {**_LORA, "mixed_precision": "bf16"}),
        ("preference", make_answers(4), {**_LORA, "loss": "kto"}),
        ("distillation", _ANSWERS, {}),
        ("embedding", _TEXTS, {"loss": "infonce"}),
    ],
    ids=["dpo", "dpo lora", "dpo lora bf16", "kto lora", "distillation", "embedding"],
)
def test_training_is_the_same(
    task: str, rows: list[dict[str, Any]], settings: dict[str, Any], tmp_path: Path,
    in_another_thread: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(processor, "has_bf16", lambda: True)
    folder = make_model(tmp_path / "model")
    settings = {"micro_batch_size": 1, "global_batch_size": 2, **settings}
    if task == "distillation":
        settings["teacher"] = str(folder)
    stored, recomputed = (
        run_ours(task, folder, rows, checkpoint_activations=is_on, **settings)
        for is_on in (False, True)
    )
    losses = [[line["loss"] for line in run.lines] for run in (stored, recomputed)]
    assert losses[0] == losses[1]
    for mine, theirs in zip(stored.weights, recomputed.weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
