"""Logits and beams of a split model, far from a tie."""

from __future__ import annotations

from typing import Any

import torch

from rapidformer.engine import RapidformerEngine
from tests.parity.harness import PADDED
from tests.parity.models import build_model, sharpen


def generate(names: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    answers = {}
    for name in names:
        engine = RapidformerEngine(args={**PADDED, **settings})
        model: Any = build_model(name)
        sharpen(model)
        engine.compose(model)
        model.eval()
        ids = torch.tensor([[5, 6, 7], [9, 10, 11]])
        options = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
        with torch.no_grad():
            logits = model(input_ids=ids, labels=ids).logits.numpy().copy()
            ids = model.generate(ids, num_beams=2, **options).tolist()
        answers[name] = (logits, ids)
    engine.close()
    return answers
