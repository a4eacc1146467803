"""Every loss of rerankers beside sentence-transformers' own trainer, step by step, on a tiny BERT.

    python -m tests.borrowed.cross_encoder_parity [NAME ...]

The same weights and rows, plain SGD, fp32. Prints the largest difference of losses and gradient
norms of four steps, and of the scores after them, in all of which 1e-6 is the limit.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import cross_encoder as theirs

from rapidformer.dialects.sentence_transformers import cross_encoder as ours
from tests.dialects.cross_encoder_rig import make_folder, run_script

LIMIT = 1e-6
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bce": ("BinaryCrossEntropyLoss", {}),
    "bce, weighed": ("BinaryCrossEntropyLoss", {"pos_weight": torch.tensor(3.0)}),
    "mse": ("MSELoss", {}),
    "margin_mse": ("MarginMSELoss", {}),
    "listnet": ("ListNetLoss", {}),
}


def main() -> int:
    worst = 0.0
    for case in sys.argv[1:] or CASES:
        name, options = CASES[case]
        with tempfile.TemporaryDirectory() as place:
            folder = make_folder(Path(place) / "model")
            wanted = run_script(theirs, name, folder, Path(place) / "theirs", **options)
            found = run_script(ours, name, folder, Path(place) / "ours", **options)
        gaps = [
            float(np.abs((np.array(a) - np.array(b)) / np.maximum(1, np.abs(b))).max())
            for a, b in zip(found[:3], wanted[:3], strict=True)
        ]
        print(f"{case:<14} steps {gaps[0]:.1e}, scores {gaps[1]:.1e}, then {gaps[2]:.1e}")
        worst = max(worst, *gaps)
    print(f"largest difference: {worst:.1e}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
