"""``rapidformer export --format onnx``: read back by onnxruntime.

One small model: the exporter of torch takes seconds. `tests/borrowed/export_families.py` has all
families.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification

import rapidformer
from rapidformer.checkpoint.exporting import plain_process, proof
from rapidformer.errors import ConfigurationError, ModelError

from .test_exporting import save_base


@pytest.mark.slow
def test_an_encoder_takes_any_batch_and_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute(folder: Path, rows: plain_process.Rows) -> Any:
        shapes.extend(row["input_ids"].shape for row in rows)
        return plain_process.compute_outputs(plain_process.load_model(folder), rows)

    shapes: list[torch.Size] = []
    monkeypatch.setattr(proof, "_compute_plainly", compute)
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=60, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=32
    )
    model = DistilBertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    found = rapidformer.export(tmp_path / "model", tmp_path / "out", format="onnx")
    assert found.proof and found.proof.limit == 1e-4 and found.proof.largest < 1e-4
    assert shapes == [(1, 16), (2, 9), (3, 4)]
    assert b"site-packages" not in (tmp_path / "out" / "model.onnx").read_bytes()
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    ids = np.arange(5 * 21).reshape(5, 21) % 60
    (logits,) = session.run(["logits"], {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    expected = model(torch.from_numpy(ids)).logits.detach()
    torch.testing.assert_close(torch.from_numpy(logits), expected, atol=1e-4, rtol=0)
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {"config.json", "README.md"}


def test_what_is_no_encoder_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    with pytest.raises(ModelError, match="LlamaForCausalLM of type llama cannot be written; enc"):
        rapidformer.export(base, tmp_path / "out", format="onnx")
    with pytest.raises(ConfigurationError, match="--format onnx writes fp32, not bf16"):
        rapidformer.export(base, tmp_path / "out", format="onnx", dtype="bf16")
