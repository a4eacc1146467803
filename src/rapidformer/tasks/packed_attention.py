"""Attention that stays inside each example of a packed row, proved on the model itself.

Most models of transformers see from positions that start anew where an example begins; some look
at an explicit mask only; some can do neither, and a few take the positions and let attention pass
all the same. What a reader would get wrong: no list of families decides here. A packed row and its
examples alone are run through the user's own model, the first way that gives equal results is
taken, and a model that has none is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rapidformer.compat.transformers_models import get_attention
from rapidformer.errors import ModelError
from rapidformer.log import get_logger

Batch = dict[str, Any]
_MARK = "packed_attention"
_SIZES: tuple[int, ...] = (5, 7, 4)
# Longer windows than this would make the proof a long run of its own.
_LONGEST_PROVED_WINDOW = 256
# Of the largest result. Round-off of deep models stays below the first. What one example does to
# the next, seen by changing it, is nothing at all where they are apart, but with a mixture of
# experts: other tokens take other experts, and the rows of the rest are rounded in another company
# (by 2e-6 in 48 layers). What recurrent layers carry over was never seen below 5e-4.
_LARGEST_DIFFERENCE = 1e-3
_LARGEST_EFFECT = 3e-5
_LEAST_EFFECT = 1e-4


def apply_packed_attention(model: Any, length: int) -> None:
    """Find how this model keeps examples apart, and remember it in the model."""
    proof = _Proof(model, length)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            way = proof.find_way()
    finally:
        model.train(was_training)
    setattr(model, _MARK, way)
    for module in model.modules():
        # It looks for padding without a mask in every batch, and would warn of ours.
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _say_nothing


def get_inputs(model: Any, batch: Batch) -> Batch:
    """What the model is called with; only a packed batch is changed."""
    if "position_ids" not in batch:
        return batch
    # The batch's own mask says what is padding. Told of it, the models would not look at the
    # positions; and padding comes last, where a causal model's tokens never see it.
    inputs = {name: value for name, value in batch.items() if name != "attention_mask"}
    return _WAYS[getattr(model, _MARK)](model, inputs)


def _say_nothing(*_: Any, **__: Any) -> None: ...


def _use_positions(model: Any, inputs: Batch) -> Batch:
    # Without a cache: its presence means one long text to the models.
    return {**inputs, "use_cache": False}


def _use_mask(model: Any, inputs: Batch) -> Batch:
    return {**inputs, "use_cache": False, "attention_mask": _build_mask(model, inputs)}


def _use_masks_by_layer(model: Any, inputs: Batch) -> Batch:
    masks = {
        "full_attention": _build_mask(model, inputs),
        "sliding_attention": _build_mask(model, inputs, _get_window(model.config)),
    }
    return {**inputs, "use_cache": False, "attention_mask": masks}


_WAYS: dict[str, Callable[[Any, Batch], Batch]] = {
    "positions": _use_positions,
    "a mask": _use_mask,
    "a mask for each kind of layer": _use_masks_by_layer,
}


def _build_mask(model: Any, inputs: Batch, window: int | None = None) -> torch.Tensor:
    """Whom each token may look at: those before it in its own example."""
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
    # The other implementations add the mask to the scores.
    added = torch.zeros(allowed.shape, device=positions.device)
    return added.masked_fill(~allowed, torch.finfo(torch.float32).min)


def _get_window(config: Any) -> int | None:
    window = getattr(config.get_text_config(), "sliding_window", None)
    return int(window) if isinstance(window, int) and window > 0 else None


class _Rows(NamedTuple):
    """Two packed rows, cut differently."""

    ids: torch.Tensor
    changed: torch.Tensor
    """The same with other tokens in the first example."""
    positions: torch.Tensor
    sizes: tuple[tuple[int, ...], ...]


class _Finding(NamedTuple):
    """How one way did."""

    difference: float
    """Between packed and alone."""
    effect: float
    """Of another first example on those after it."""

    @property
    def is_good(self) -> bool:
        return self.difference <= _LARGEST_DIFFERENCE and self.effect <= _LARGEST_EFFECT


class _Proof:
    """Packed rows beside the same examples alone, and beside rows that begin otherwise."""

    def __init__(self, model: Any, length: int) -> None:
        self.model = model
        self.length = length
        self.name = type(model).__name__
        self.rows = self._build_rows()

    def find_way(self) -> str:
        alone = self._run_alone()
        joined = self._measure(lambda ids: {"input_ids": ids, "use_cache": False}, alone)
        if joined.effect < _LEAST_EFFECT:
            raise ModelError(
                f"--packing: in {self.name} a text hardly depends on its beginning (by "
                f"{joined.effect:.0e}), so it cannot be shown that packed examples stay apart: "
                "leave --packing out."
            )
        findings = []
        for way in _WAYS:
            found = self._try_way(way, alone)
            if found is not None and found.is_good:
                get_logger().info(
                    "packing   %s keeps examples apart by %s, as tried on this model: packed and "
                    "alone differ by %.0e, and the effect of one on the next is %.0e (joined: "
                    "%.0e)",
                    self.name, way, found.difference, found.effect, joined.effect,
                )  # fmt: skip
                return way
            told = (
                "not possible" if found is None else f"{found.difference:.0e}, {found.effect:.0e}"
            )
            findings.append(f"by {way}: {told}")
        raise ModelError(
            f"--packing: {self.name} does not keep the examples of a packed row apart. It was "
            "tried how far packed and alone differ, and how far an example changes those after "
            f"it: {'; '.join(findings)}. Leave --packing out."
        )

    def _try_way(self, way: str, alone: torch.Tensor) -> _Finding | None:
        if way != "positions" and not self._is_window_seen():
            return None
        positions, get_packed = self.rows.positions, _WAYS[way]
        try:
            return self._measure(
                lambda ids: get_packed(self.model, {"input_ids": ids, "position_ids": positions}),
                alone,
            )
        except Exception:
            # A model may choke on a mask in any way it likes: this way is not for it.
            return None

    def _measure(
        self, get_inputs: Callable[[torch.Tensor], Batch], alone: torch.Tensor
    ) -> _Finding:
        packed = self._run(get_inputs(self.rows.ids))
        otherwise = self._run(get_inputs(self.rows.changed))
        scale = alone.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        is_later = (self.rows.positions == 0).cumsum(dim=1) > 1
        return _Finding(
            difference=float((packed - alone).abs().max() / scale),
            effect=float((packed - otherwise)[is_later].abs().max() / scale),
        )

    def _is_window_seen(self) -> bool:
        """Whether a mask of ours that forgot the model's window would be found out."""
        window = _get_window(self.model.config)
        return window is None or window >= self.length or max(self.rows.sizes[0]) > window

    def _build_rows(self) -> _Rows:
        config, sizes = self.model.config.get_text_config(), _SIZES
        window = _get_window(config)
        if window is not None and window < min(self.length, _LONGEST_PROVED_WINDOW):
            sizes = (window + 4, *_SIZES[1:])
        limit = getattr(config, "max_position_embeddings", None) or sum(sizes)
        if sum(sizes) > limit:
            sizes = tuple(max(1, limit // len(_SIZES)) for _ in _SIZES)
        # Whatever the tokens are, but none that means something to the model itself.
        special = _flatten(config.pad_token_id, config.bos_token_id, config.eos_token_id)
        count = self.model.get_input_embeddings().num_embeddings
        usual = torch.tensor([i for i in range(min(count, 5000)) if i not in special])
        dice = torch.Generator().manual_seed(0)
        picked = torch.randint(len(usual), (2, sum(sizes)), generator=dice)
        cuts = (sizes, (*sizes[1:], sizes[0]))
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in cuts])
        is_first = (positions == 0).cumsum(dim=1) == 1
        other = torch.where(is_first, (picked + 1) % len(usual), picked)
        device = next(self.model.parameters()).device
        return _Rows(usual[picked].to(device), usual[other].to(device), positions.to(device), cuts)

    def _run_alone(self) -> torch.Tensor:
        results: list[list[torch.Tensor]] = []
        for ids, sizes in zip(self.rows.ids, self.rows.sizes, strict=True):
            parts = ids.split(list(sizes))
            results.append([self._run({"input_ids": part[None]})[0] for part in parts])
        return torch.stack([torch.cat(row) for row in results])

    def _run(self, inputs: Batch) -> torch.Tensor:
        logits: torch.Tensor = self.model(**inputs).logits
        return logits.float()


def _flatten(*ids: Any) -> set[int]:
    """Ids of special tokens: each may be one, several or none."""
    lists = [value if isinstance(value, list) else [value] for value in ids if value is not None]
    return {token for some in lists for token in some}
