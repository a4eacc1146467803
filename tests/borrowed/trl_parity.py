"""Every loss of preferences beside TRL's own trainer, step by step, on a tiny Llama and GPT-2.

    python -m tests.borrowed.trl_parity [NAME ...]

The same weights, rows in the same order, plain SGD, fp32. Prints the largest difference of losses,
of metrics (over the size of the log-probabilities they are made of) and of weights after each step.
KTO's batch is one for the whole update: TRL defines its baseline by the device's batch.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.tasks.preference_rig import make_answers, make_model, make_pairs, run_ours
from tests.tasks.preference_trl import compare, run_theirs

LIMIT = 1e-6
# name -> their trainer, our settings, theirs
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sigmoid": ("DPO", {}, {}),
    "sigmoid, normalized": ("DPO", {"length_normalized": True}, {"loss_type": ["sigmoid_norm"]}),
    "ipo": ("DPO", {"loss": "ipo"}, {"loss_type": ["ipo"]}),
    "hinge": ("DPO", {"loss": "hinge"}, {"loss_type": ["hinge"]}),
    "robust": ("DPO", {"loss": "robust", "label_smoothing": 0.2},
               {"loss_type": ["robust"], "label_smoothing": 0.2}),
    "apo_zero": ("DPO", {"loss": "apo_zero"}, {"loss_type": ["apo_zero"]}),
    "sigmoid and sft": ("DPO", {"sft_weight": 0.3},
                        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}),
    "simpo": ("CPO", {"loss": "simpo"},
              {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0}),
    "orpo": ("ORPO", {"loss": "orpo"}, {}),
    "kto": ("KTO", {"loss": "kto"}, {}),
    "reward": ("Reward", {"center_rewards_coefficient": 0.01},
               {"center_rewards_coefficient": 0.01}),
}  # fmt: skip


def main() -> int:
    chosen, worst = sys.argv[1:] or list(CASES), 0.0
    for kind in ("llama", "gpt2"):
        for name in chosen:
            with tempfile.TemporaryDirectory() as folder:
                gaps = run_case(kind, name, Path(folder))
            figures = ", ".join(f"{what} {gap:.1e}" for what, gap in gaps.items())
            print(f"{kind:<6} {name:<20} {figures}", flush=True)
            worst = max(worst, *gaps.values())
    print(f"largest difference: {worst:.1e}")
    return int(worst > LIMIT)


def run_case(kind: str, name: str, folder: Path) -> dict[str, float]:
    trainer, ours, theirs = CASES[name]
    task = "reward" if name == "reward" else "preference"
    model = make_model(folder / "model", kind, is_reward=task == "reward")
    rows = make_answers(4) if name == "kto" else make_pairs(12)
    if name == "reward":
        rows = [{**row, "margin": 0.1 * number} for number, row in enumerate(rows)]
    epochs = 3 if name == "kto" else 1
    sizes = {"micro_batch_size": 4, "global_batch_size": 4, "epochs": epochs}
    return compare(
        run_ours(task, model, rows, **sizes, **ours),
        run_theirs(trainer, model, rows, folder / "trl", batch=4, epochs=epochs, **theirs),
    )


if __name__ == "__main__":
    sys.exit(main())
