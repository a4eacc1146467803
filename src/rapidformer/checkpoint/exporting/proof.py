"""Prove that an exported folder is the trained model: plain transformers gives the same logits."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rapidformer.checkpoint.exporting import plain_process
from rapidformer.checkpoint.exporting.build import build_model
from rapidformer.checkpoint.exporting.source import Source
from rapidformer.errors import ModelError
from rapidformer.models.configuration import get_position_limit

# How far the logits may move, relative to their size.
_ROUND_OFF = 1e-4
"""The same sums in another order, in fp32."""
_MARGIN = 4
"""Times the effect of rounding the model's own weights: merged adapters are rounded in the sum."""
_LENGTHS = (16, 9, 4)
_SKIP = "--no-verify exports it without the proof"


@dataclass(frozen=True)
class Proof:
    """How far the exported model's outputs are from the trained model's."""

    largest: float
    relative: float
    limit: float

    def describe(self) -> str:
        return (
            f"largest difference in the logits {self.largest:.1e}; relative to their size "
            f"{self.relative:.1e} (limit {self.limit:.1e})"
        )


def prove(source: Source, config: Any, folder: Path, dtype: torch.dtype) -> Proof:
    """Compare the trained model with the folder, one after the other: only one is in memory."""
    model: Any = build_model(source, config)
    rows = build_rows(model)
    expected = plain_process.compute_outputs(model, rows)
    limit = _ROUND_OFF
    if dtype.itemsize < torch.float32.itemsize:
        _round_weights(model, dtype)
        rounded = plain_process.compute_outputs(model, rows)
        limit += _MARGIN * compare(expected, rounded, 0.0).relative
    del model
    gc.collect()
    proof = compare(expected, _compute_plainly(folder, rows), limit)
    if not proof.relative <= proof.limit:  # NaN is not
        raise ModelError(
            f"plain transformers computes other logits from the export than the trained model's: "
            f"{proof.describe()}. Nothing was exported. If --dtype is 16-bit, try fp32; {_SKIP}."
        )
    return proof


def _round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """To the values that the export can hold; the model still computes in its own type."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(parameter.to(dtype))


def build_rows(model: Any) -> plain_process.Rows:
    """A few fixed inputs, each a batch of its own: not every model has a padding token."""
    config, kind = model.config, model.main_input_name
    generator = torch.Generator().manual_seed(0)
    if kind == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = (1, getattr(config, "num_channels", 3), height, width)
        return [{kind: torch.rand(shape, generator=generator)} for _ in _LENGTHS]
    if kind != "input_ids":
        raise ModelError(
            f"no inputs are known for {type(model).__name__}, which takes {kind}: {_SKIP}."
        )
    limit = get_position_limit(config) or max(_LENGTHS)
    rows = []
    for length in dict.fromkeys(min(length, limit) for length in _LENGTHS):
        ids = torch.randint(config.vocab_size, (1, length), generator=generator)
        ids = _end_once(ids, config)
        if type(model).__name__.endswith("ForMultipleChoice"):
            ids = torch.stack([ids, ids.flip(-1)], dim=1)
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        if config.is_encoder_decoder and not _builds_decoder_inputs(model):
            rows[-1]["decoder_input_ids"] = ids.clone()
    return rows


def _end_once(ids: Tensor, config: Any) -> Tensor:
    """BART's classifiers read the state of the one ending token."""
    end = config.eos_token_id
    end = end[0] if isinstance(end, list) else end
    if end is None or not 0 <= end < config.vocab_size or config.vocab_size == 1:
        return ids
    ids[ids == end] = (end + 1) % config.vocab_size
    ids[:, -1] = end
    return ids


def _builds_decoder_inputs(model: Any) -> bool:
    """Heads that label whole inputs shift them for the decoder by themselves."""
    return type(model).__name__.endswith(("ForSequenceClassification", "ForQuestionAnswering"))


def compare(expected: dict[str, Tensor], found: dict[str, Tensor], limit: float) -> Proof:
    """The largest and the mean difference over all rows."""
    if expected.keys() != found.keys():
        raise ModelError(
            f"plain transformers returns {', '.join(sorted(found))} for the export, the trained "
            f"model {', '.join(sorted(expected))}. Nothing was exported."
        )
    ours = torch.cat([expected[name].double().flatten() for name in sorted(expected)])
    theirs = torch.cat([found[name].double().flatten() for name in sorted(expected)])
    if ours.shape != theirs.shape:
        raise ModelError("the export returns logits of another shape. Nothing was exported.")
    difference = ours - theirs
    relative = float(difference.norm() / ours.norm().clamp(min=1e-12))
    return Proof(float(difference.abs().max()), relative, limit)


def _compute_plainly(folder: Path, rows: plain_process.Rows) -> dict[str, Tensor]:
    """The outputs of the folder in a new process that knows transformers and peft alone."""
    with tempfile.TemporaryDirectory() as place:
        inputs, outputs = Path(place) / "inputs.safetensors", Path(place) / "outputs.safetensors"
        plain_process.save_rows(rows, inputs)
        # -P: the folder of the script would otherwise be searched for modules first.
        words = [sys.executable, "-P", plain_process.__file__, folder, inputs, outputs]
        done = subprocess.run(
            [str(word) for word in words],
            capture_output=True,
            text=True,
            check=False,
            # On the CPU like the trained model's, and without looking for updates of the files.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        )
        if done.returncode != 0 or not outputs.is_file():
            reason = next(reversed(done.stderr.strip().splitlines()), f"status {done.returncode}")
            raise ModelError(
                f"plain transformers cannot load the export: {reason}. Nothing was exported; "
                f"{_SKIP}."
            )
        return load_file(outputs)
