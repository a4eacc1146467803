"""Log-probabilities of labelled tokens, in fp32.

They are computed from the hidden states of labelled tokens, a chunk at a time, with a gradient
(the policy) and without one (the reference): logits of all tokens over the vocabulary never exist,
unless the vocabulary is small or the head cannot wait (``--fused-loss``): one that is no linear
layer, or one with adapters that are split over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional

from rapidformer.accel.cache import takes_use_cache
from rapidformer.accel.fused_loss.chunked import Recipe
from rapidformer.accel.fused_loss.followed import compute_logit_losses
from rapidformer.accel.fused_loss.fused_loss import deferring
from rapidformer.accel.unpad.places import send
from rapidformer.accel.unpad.promises import reading_labelled
from rapidformer.data.batch import IGNORED_LABEL, find_host_copy


class TokenScores(NamedTuple):
    """What a model says of each labelled token; as large as the labels, 0 where a label is -100."""

    logprobs: Tensor
    """The only one with a gradient."""
    entropies: Tensor
    mean_logits: Tensor
    """The mean over the vocabulary."""
    is_best: Tensor
    """1 where no other token has a larger logit."""


def get_logits(
    model: Any, inputs: Mapping[str, Tensor], labels: Tensor, *, is_shifted: bool = True
) -> Tensor:
    """``model(**inputs).logits``, of which only those that predict labels may be read.

    They need not exist: ``sum_divergences`` and torch's cross entropy compute them in chunks.
    """
    options = {"use_cache": False} if takes_use_cache(model) else {}
    with reading_labelled(model, inputs, labels, is_shifted=is_shifted), deferring(model):
        outputs = model(**{**options, **inputs})
    return outputs if isinstance(outputs, Tensor) else outputs["logits"]


def get_token_logprobs(
    model: Any,
    inputs: Mapping[str, Tensor],
    labels: Tensor,
    *,
    is_shifted: bool = True,
    temperature: float = 1.0,
) -> Tensor:
    """The log-probability of each labelled token given those before it; 0 where the label is -100.

    As large as ``labels``. ``is_shifted``: position i predicts token i + 1, as in a decoder, so the
    first token of a row has no prediction. Logits are divided by the temperature.
    """
    return _score(model, inputs, labels, Recipe(is_by_row=True), is_shifted, temperature)[0]


def get_token_scores(
    model: Any,
    inputs: Mapping[str, Tensor],
    labels: Tensor,
    *,
    is_shifted: bool = True,
    temperature: float = 1.0,
) -> TokenScores:
    """``get_token_logprobs`` with what else the same pass over the logits can tell, for metrics."""
    recipe = Recipe(is_by_row=True, has_statistics=True)
    return TokenScores(*_score(model, inputs, labels, recipe, is_shifted, temperature))


def flatten_rows(logits: Tensor, labels: Tensor, *, is_shifted: bool) -> tuple[Tensor, Tensor]:
    """Logits, [rows, words], and the label that each row of them predicts."""
    if is_shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return logits.flatten(0, 1), labels.flatten()


def find_labelled_rows(labels: Tensor, *, is_shifted: bool) -> Tensor | None:
    """Which of the flattened predictions have a label; None if the device would have to be asked.

    So it is for a step that a CUDA graph replays, where no tensor's size may depend on values.
    """
    known = find_host_copy(labels)
    if known is None:
        return None
    targets = known[:, 1:] if is_shifted else known
    return send((targets != IGNORED_LABEL).flatten().nonzero().squeeze(1), labels.device)


def _score(
    model: Any, inputs: Mapping[str, Tensor], labels: Tensor, recipe: Recipe, is_shifted: bool,
    temperature: float,
) -> list[Tensor]:  # fmt: skip
    """Log-probabilities, and the statistics that the recipe asks for."""
    logits = get_logits(model, inputs, labels, is_shifted=is_shifted)
    rows, targets = flatten_rows(logits, labels, is_shifted=is_shifted)
    if temperature != 1.0:
        rows = rows.float() / temperature
    recipe = replace(recipe, labelled=find_labelled_rows(labels, is_shifted=is_shifted))
    losses, statistics = compute_logit_losses(rows, targets, recipe)
    grids = [-losses, *([] if statistics is None else statistics.unbind())]
    grids = [values.view(len(labels), labels.shape[1] - is_shifted) for values in grids]
    return [functional.pad(grid, (1, 0)) for grid in grids] if is_shifted else grids
