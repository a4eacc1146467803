"""Reward models: every pair counts once, and any program scores what training scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rapidformer
from tests.tasks.preference_rig import make_model, make_pairs, make_tokenizer, run_ours

# Two pairs are right, one is wrong; OpenRLHF once reported 0.5 and 1.2201 for them at batch 2.
_SCORES = {"w1": 1.0, "w2": 0.0, "w3": 1.5, "w4": 0.5, "w5": 0.0, "w6": 2.0}
_THREE = [
    {"prompt": "w9 ", "chosen": "w1", "rejected": "w2"},
    {"prompt": "w9 ", "chosen": "w3", "rejected": "w4"},
    {"prompt": "w9 ", "chosen": "w5", "rejected": "w6"},
]


def make_scorer(folder: Path) -> Path:
    """A model whose score is that of the last word: its layers add nothing."""
    from transformers import AutoModelForSequenceClassification

    make_model(folder, is_reward=True, pads_with_end=True)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    words = make_tokenizer(pads_with_end=True).get_vocab()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.score.weight.zero_()
        for place, (word, score) in enumerate(_SCORES.items(), start=1):
            model.model.embed_tokens.weight[words[word]] = torch.eye(16)[place]
            model.score.weight[0, place] = score / 4  # the norm scales a unit vector to 4
    model.save_pretrained(folder)
    return folder


def test_three_pairs_in_batches_of_two(tmp_path: Path) -> None:
    """A smaller last batch weighs as much as its pairs: in training and in evaluation."""
    folder = make_scorer(tmp_path / "scorer")
    sizes = {"micro_batch_size": 2, "global_batch_size": 4}
    line = run_ours("reward", folder, _THREE, **sizes).lines[0]
    report = rapidformer.evaluate(
        {"validation": _THREE}, task="reward", load=str(folder), eval_micro_batch_size=2,
        log_level="error", progress=False,
    ).metrics  # fmt: skip
    for numbers in (line, report):
        assert numbers["loss"] == pytest.approx(0.9178, abs=5e-5)
        assert numbers["accuracy"] == pytest.approx(2 / 3)
        assert numbers["margin"] == pytest.approx(0.0, abs=5e-5)
        assert numbers["mean_reward"] == pytest.approx(5 / 6, abs=5e-5)
    assert report["min_reward"] == pytest.approx(0.0, abs=5e-5)
    assert report["max_reward"] == pytest.approx(2.0, abs=5e-5)


@pytest.mark.parametrize(
    ("kind", "pads_with_end"), [("llama", True), ("gpt2", True), ("llama", False)]
)
def test_export_scores_the_same_elsewhere(kind: str, pads_with_end: bool, tmp_path: Path) -> None:
    """Plain transformers with the saved tokenizer, padded batches, the end token in the texts."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base = make_model(tmp_path / "base", kind, pads_with_end=pads_with_end)
    save = tmp_path / "run"
    run_ours("reward", base, make_pairs(6), micro_batch_size=3, save=str(save))
    texts = ["w1 w2 w3 w4 w5", "w6", "w7 w8 w9"]
    scored = rapidformer.predict(texts, load=str(save), log_level="error", progress=False)
    tokenizer = AutoTokenizer.from_pretrained(save / "last")
    model = AutoModelForSequenceClassification.from_pretrained(save / "last")
    assert model.config.pad_token_id == tokenizer.pad_token_id
    ended = [f"{text} {tokenizer.eos_token}" for text in texts]
    with torch.no_grad():
        batch = tokenizer(ended, return_tensors="pt", padding=True)
        together = model(**batch).logits[:, 0].tolist()
        alone = [float(model(**tokenizer(text, return_tensors="pt")).logits) for text in ended]
    scores = [answer["score"] for answer in scored]
    assert scores == pytest.approx(together, abs=1e-6)
    assert scores == pytest.approx(alone, abs=1e-6)
    assert len({round(score, 4) for score in scores}) == 3
