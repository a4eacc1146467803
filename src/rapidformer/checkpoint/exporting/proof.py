"""Prove that an export is the trained model, and that the trained model is not the base model.

Plain transformers must give the same logits, and some tensors must differ from those that training
started from. These are compared in the type that is written: small changes to a 16-bit model may be
lost by rounding, and then the export is the base model although training did change its weights.
"""

from __future__ import annotations

import gc
import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rapidformer.checkpoint.exporting import plain_process
from rapidformer.checkpoint.exporting.build import Recipes, build_model, build_start, drop_ties
from rapidformer.checkpoint.exporting.files import cast
from rapidformer.checkpoint.exporting.source import Source
from rapidformer.checkpoint.frozen import compare_checksums, compute_checksum
from rapidformer.errors import ModelError
from rapidformer.hub import looks_like_path
from rapidformer.log import get_logger
from rapidformer.models.configuration import get_position_limit
from rapidformer.models.location import has_weights
from rapidformer.models.towers import get_text_config, list_placeholders

# How far the logits may move, relative to their size.
_ROUND_OFF = 1e-4
"""The same sums in another order, in fp32."""
_MARGIN = 4
"""Times the effect of rounding the model's own weights: merged adapters are rounded in the sum."""
_MOST = 0.5
"""Where rounding costs more than that: another model's logits are about 1.4 away."""
_LENGTHS = (16, 9, 4)
_SHIFTING_HEADS = ("ForSequenceClassification", "ForQuestionAnswering")
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


def prove(
    source: Source,
    config: Any,
    folder: Path,
    rounds: Callable[[Tensor], Tensor] | None,
    *,
    by: str = "plain transformers",
    batched: bool = False,
) -> Proof:
    """Compare the trained model with the folder, one after the other: only one is in memory.

    ``rounds`` is what the export makes of a weight, if that is less than fp32. ``batched`` inputs
    have several rows and padding.
    """
    model: Any = build_model(source, config)
    rows = _build_rows(model, folder)
    if batched:
        rows = [_widen(model, row, number) for number, row in enumerate(rows, start=1)]
    expected = plain_process.compute_outputs(model, rows)
    limit = _ROUND_OFF
    if rounds is not None:
        # To the values that the export can hold; the model still computes in its own type.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.copy_(rounds(parameter))
        rounded = plain_process.compute_outputs(model, rows)
        limit = min(limit + _MARGIN * _compare(expected, rounded, 0.0).relative, _MOST)
    del model
    gc.collect()
    proof = _compare(expected, _compute_plainly(folder, rows), limit)
    if not proof.relative <= proof.limit:  # NaN is not
        raise ModelError(
            f"{by} computes other logits from the export than the trained model's: "
            f"{proof.describe()}. Nothing was exported. If the weights are rounded (--dtype, "
            f"--quantize), try --dtype fp32; {_SKIP}."
        )
    get_logger().info("verified  by %s: %s", by, proof.describe())
    return proof


def _widen(model: Any, row: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """So many rows in one batch: each begins elsewhere, and each after the first has padding."""
    ids = torch.cat([row["input_ids"].roll(shift, -1) for shift in range(number)])
    mask = torch.ones_like(ids)
    for shift in range(1, number):
        mask[shift, -shift:] = 0
    wide = {"input_ids": ids, "attention_mask": mask}
    if "token_type_ids" in inspect.signature(model.forward).parameters:
        kinds = getattr(model.config, "type_vocab_size", 1) or 1
        wide["token_type_ids"] = (torch.arange(ids.shape[-1]) % kinds).expand_as(ids).contiguous()
    return wide


def _build_rows(model: Any, folder: Path) -> plain_process.Rows:
    """A few fixed inputs, each a batch of its own: not every model has a padding token."""
    config, kind = get_text_config(model.config), model.main_input_name
    generator = torch.Generator().manual_seed(0)
    if kind == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = (1, getattr(config, "num_channels", 3), height, width)
        return [{kind: torch.rand(shape, generator=generator)} for _ in _LENGTHS]
    if kind in ("input_values", "input_features"):
        return _build_audio_rows(model, folder)
    if kind != "input_ids":
        raise ModelError(
            f"no inputs are known for {type(model).__name__}, which takes {kind}: {_SKIP}."
        )
    limit, end = get_position_limit(config) or max(_LENGTHS), config.eos_token_id
    end = end[0] if isinstance(end, list) else end
    placeholders = list_placeholders(model.config)
    words = torch.tensor([n for n in range(config.vocab_size) if n not in placeholders])
    rows = []
    for length in dict.fromkeys(min(length, limit) for length in _LENGTHS):
        ids = words[torch.randint(len(words), (1, length), generator=generator)]
        if end is not None and 0 <= end < config.vocab_size > 1:
            # Just one: BART's classifiers read the state of the ending token.
            ids[ids == end] = (end + 1) % config.vocab_size
            ids[:, -1] = end
        if type(model).__name__.endswith("ForMultipleChoice"):
            ids = torch.stack([ids, ids.flip(-1)], dim=1)
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        # Heads that label whole inputs shift them for the decoder by themselves.
        if model.config.is_encoder_decoder and not type(model).__name__.endswith(_SHIFTING_HEADS):
            rows[-1]["decoder_input_ids"] = ids.clone()
    return rows


def _build_audio_rows(model: Any, folder: Path) -> plain_process.Rows:
    """Noise of a few lengths, as the exported feature extractor hands it to the model."""
    from transformers import AutoFeatureExtractor

    try:
        extractor = AutoFeatureExtractor.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the export has no feature extractor that reads audio for {type(model).__name__} "
            f"({error}): {_SKIP}."
        ) from error
    generator, rate = torch.Generator().manual_seed(0), extractor.sampling_rate
    rows = []
    for length in _LENGTHS:
        noise = torch.rand(length * rate // 20, generator=generator) - 0.5
        features = extractor(noise.numpy(), sampling_rate=rate, return_tensors="pt")
        rows.append(dict(features))
        if "decoder_input_ids" in inspect.signature(model.forward).parameters:
            shape, most = (1, length), model.config.vocab_size
            rows[-1]["decoder_input_ids"] = torch.randint(most, shape, generator=generator)
    return rows


def _compare(expected: dict[str, Tensor], actual: dict[str, Tensor], limit: float) -> Proof:
    """The largest and the mean difference over all rows."""
    if expected.keys() != actual.keys():
        raise ModelError(
            f"plain transformers returns {', '.join(sorted(actual))} for the export, the trained "
            f"model {', '.join(sorted(expected))}. Nothing was exported."
        )
    ours = torch.cat([expected[name].double().flatten() for name in sorted(expected)])
    theirs = torch.cat([actual[name].double().flatten() for name in sorted(expected)])
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
            [str(word) for word in words], capture_output=True, text=True, check=False,
            # On the CPU like the trained model's, and without looking for updates of the files.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        if done.returncode != 0 or not outputs.is_file():
            reason = next(reversed(done.stderr.strip().splitlines()), f"status {done.returncode}")
            raise ModelError(
                f"plain transformers cannot load the export: {reason}. Nothing was exported; "
                f"{_SKIP}."
            )
        return load_file(outputs)


# ---- what training has changed -------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """How many tensors there are, and how many are not those of the base model."""

    changed: int
    total: int
    base: str

    def describe(self) -> str:
        return f"{self.changed} of {self.total} tensors differ from the base model {self.base}"


def count_changes(
    recipes: Recipes, source: Source, config: Any, dtype: torch.dtype, *, allow_unchanged: bool
) -> Changes | None:
    """Compare with the base; refuse an export that is the base, or of an adapter of another one."""
    problem = _find_missing_start(source)
    if problem is not None:
        get_logger().info("changes   not counted: %s", problem)
        return None
    start, fresh = build_start(source, config)
    before, after = start.model.state_dict(), recipes.model.state_dict()
    saved = source.run["base"].get("checksums", {}) if source.run and source.base else {}
    saved = {name.replace(".base_layer.", "."): entry for name, entry in saved.items()}
    checksums: dict[str, list[Any]] = {}
    changed, names = 0, list(drop_ties(recipes.model, after))
    for name in names:
        if name in fresh or name not in before:
            changed += 1
            continue
        old = start.read(before[name])
        kind = getattr(torch, str(saved[name][0]), old.dtype) if name in saved else torch.uint8
        if kind.is_floating_point:  # the packed weights of a quantized base are not comparable
            checksums[name] = compute_checksum(old.to(kind))
        new = cast(recipes.read(after[name]), dtype)
        changed += old.shape != new.shape or not torch.equal(cast(old, dtype), new)
    compare_checksums(saved, checksums, source.base)
    changes = Changes(changed, len(names), str(source.start))
    if changed == 0 and not allow_unchanged:
        raise ModelError(
            f"{changes.describe()}: this export is the base model. Check that the run trained "
            "(steps, learning rate, frozen layers) and, for 16-bit weights, try --dtype fp32; "
            "--allow-unchanged exports it nevertheless."
        )
    get_logger().info("changes   %s", changes.describe())
    return changes


def _find_missing_start(source: Source) -> str | None:
    """Why there is nothing to compare with; None if there is."""
    if source.start is None:
        return "the run names no model whose weights it started from; --base FOLDER names one"
    start = Path(source.start)
    if not start.exists() and looks_like_path(source.start):
        return f"the base model {start} is no longer there; --base FOLDER names another"
    if source.base is None and start.is_dir() and not has_weights(start):
        return f"{start} has no weights, so the run started from fresh ones"
    return None
