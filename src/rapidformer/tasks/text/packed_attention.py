"""Keep attention inside each example of a packed row, and prove it on the model itself.

Some models need positions that restart, some an explicit mask, some obey neither. A packed row and
its examples alone are run through the model: the first method that gives equal results is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rapidformer.compat.transformers_models import get_attention
from rapidformer.errors import ModelError
from rapidformer.log import get_logger
from rapidformer.models.evaluation_mode import evaluation_mode
from rapidformer.models.towers import get_shared

Batch = dict[str, Any]
_MARK = "packed_attention"
_BY_POSITIONS, _BY_MASK, _BY_MASKS = "positions", "a mask", "a mask for each kind of layer"
_SIZES: tuple[int, ...] = (5, 7, 4)
# A longer window would make the proof too slow.
_LONGEST_PROVED_WINDOW = 256
# Relative to the largest logit. The effect of an example on the next one is zero if they are
# separate, except for the round-off of a mixture of experts (2e-6 in 48 layers); the state that
# recurrent layers carry over never measured below 5e-4.
_LARGEST_DIFFERENCE = 1e-3
_LARGEST_EFFECT = 3e-5
_LEAST_EFFECT = 1e-4


def apply_packed_attention(model: Any, length: int) -> None:
    """Find how this model keeps examples apart, and store it on the model."""
    with evaluation_mode(model), torch.no_grad():
        setattr(model, _MARK, _Proof(model, length).find_way())
    for module in model.modules():
        # This check looks for padding in every batch that has no mask, and would warn about ours.
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _say_nothing


def get_inputs(model: Any, batch: Batch) -> Batch:
    """The model's inputs; only packed batches are changed."""
    if "position_ids" not in batch:
        return batch
    # The batch's mask marks only padding. With a mask, models ignore the positions; and padding
    # comes last, where no token of a causal model sees it.
    inputs = {name: value for name, value in batch.items() if name != "attention_mask"}
    return _separate(model, inputs, getattr(model, _MARK))


def _say_nothing(*_: Any, **__: Any) -> None: ...


def _separate(model: Any, inputs: Batch, way: str) -> Batch:
    # No cache: with one, models treat the row as a single text.
    inputs = {**inputs, "use_cache": False}
    if way == _BY_POSITIONS:
        return inputs
    mask: Any = _build_mask(model, inputs)
    if way == _BY_MASKS:
        window = _get_window(model.config)
        mask = {"full_attention": mask, "sliding_attention": _build_mask(model, inputs, window)}
    return {**inputs, "attention_mask": mask}


def _build_mask(model: Any, inputs: Batch, window: int | None = None) -> torch.Tensor:
    """The positions each token may attend to: earlier ones in its own example."""
    positions: torch.Tensor = inputs["position_ids"]
    example = (positions == 0).cumsum(dim=1)
    place = torch.arange(positions.shape[1], device=positions.device)
    distance = place[:, None] - place[None, :]
    allowed = (example[:, :, None] == example[:, None, :]) & (distance >= 0)
    if window is not None:
        allowed &= distance < window
    allowed = allowed[:, None]
    if get_attention(model.config) == "sdpa":
        return allowed
    # Other implementations add the mask to the attention scores.
    added = torch.zeros(allowed.shape, device=positions.device)
    return added.masked_fill(~allowed, torch.finfo(torch.float32).min)


def _get_window(config: Any) -> int | None:
    window = get_shared(config.get_text_config(), "sliding_window")
    return int(window) if isinstance(window, int) and window > 0 else None


class _Finding(NamedTuple):
    """The measurements of one method."""

    difference: float
    """The difference between packed and alone."""
    effect: float
    """The effect of a changed first example on the later ones."""

    @property
    def is_good(self) -> bool:
        return self.difference <= _LARGEST_DIFFERENCE and self.effect <= _LARGEST_EFFECT


class _Proof:
    """Compares packed rows with their examples alone, and with rows whose first example differs."""

    def __init__(self, model: Any, length: int) -> None:
        config, sizes = model.config.get_text_config(), _SIZES
        window = _get_window(config)
        if window is not None and window < min(length, _LONGEST_PROVED_WINDOW):
            sizes = (window + 4, *_SIZES[1:])
        limit = getattr(config, "max_position_embeddings", None) or sum(sizes)
        if sum(sizes) > limit:
            sizes = tuple(max(1, limit // len(_SIZES)) for _ in _SIZES)
        # Any tokens will do, except those with a special meaning to the model.
        named = (config.pad_token_id, config.bos_token_id, config.eos_token_id)
        special = {token for ids in named for token in (ids if isinstance(ids, list) else [ids])}
        count = model.get_input_embeddings().num_embeddings
        usual = torch.tensor([i for i in range(min(count, 5000)) if i not in special])
        dice = torch.Generator().manual_seed(0)
        picked = torch.randint(len(usual), (2, sum(sizes)), generator=dice)
        cuts = (sizes, (*sizes[1:], sizes[0]))  # two rows
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in cuts])
        is_first = (positions == 0).cumsum(dim=1) == 1
        other = torch.where(is_first, (picked + 1) % len(usual), picked)
        device = next(model.parameters()).device
        self.model, self.name = model, type(model).__name__
        self.ids, self.changed = usual[picked].to(device), usual[other].to(device)
        self.positions = positions.to(device)
        parts = [ids.split(list(cut)) for ids, cut in zip(self.ids, cuts, strict=True)]
        alone = [[self._run({"input_ids": part[None]})[0] for part in row] for row in parts]
        self.alone = torch.stack([torch.cat(row) for row in alone])
        # Whether the test would notice if our mask ignored the model's sliding window.
        self.sees_window = window is None or window >= length or max(sizes) > window

    def find_way(self) -> str:
        joined = self._measure(None)
        if joined.effect < _LEAST_EFFECT:
            raise ModelError(
                f"--packing: the logits of {self.name} hardly depend on earlier tokens (by "
                f"{joined.effect:.0e}), so it cannot be shown that packed examples stay apart: "
                "omit --packing."
            )
        findings = []
        for way in (_BY_POSITIONS, _BY_MASK, _BY_MASKS):
            measured = self._try_way(way)
            if measured is not None and measured.is_good:
                get_logger().info(
                    "packing   %s keeps examples apart by %s, tested on this model: packed and "
                    "alone differ by %.0e; the effect of an example on the next is %.0e (%.0e if "
                    "they are not kept apart)",
                    self.name, way, measured.difference, measured.effect, joined.effect,
                )  # fmt: skip
                return way
            shown = measured and f"{measured.difference:.0e}, {measured.effect:.0e}"
            findings.append(f"by {way}: {shown or 'not possible'}")
        raise ModelError(
            f"--packing: {self.name} does not keep the examples of a packed row apart. Measured: "
            "the difference between packed and alone, and the effect of an example on those after "
            f"it: {'; '.join(findings)}. Omit --packing."
        )

    def _try_way(self, way: str) -> _Finding | None:
        if way != _BY_POSITIONS and not self.sees_window:
            return None
        try:
            return self._measure(way)
        except Exception:
            # A model may fail on a mask with any exception; this method does not work for it.
            return None

    def _measure(self, way: str | None) -> _Finding:
        """What comes of keeping examples apart this way, or not at all."""
        packed, with_change = (self._run_packed(ids, way) for ids in (self.ids, self.changed))
        scale = self.alone.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        is_later = (self.positions == 0).cumsum(dim=1) > 1
        return _Finding(
            difference=float((packed - self.alone).abs().max() / scale),
            effect=float((packed - with_change)[is_later].abs().max() / scale),
        )

    def _run_packed(self, ids: torch.Tensor, way: str | None) -> torch.Tensor:
        if way is None:
            return self._run({"input_ids": ids, "use_cache": False})
        inputs = {"input_ids": ids, "position_ids": self.positions}
        return self._run(_separate(self.model, inputs, way))

    def _run(self, inputs: Batch) -> torch.Tensor:
        logits: torch.Tensor = self.model(**inputs).logits
        return logits.float()
