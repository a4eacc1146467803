"""A promise: of what a model returns, only what predicts these labels is read.

Log-probabilities of labelled tokens are computed from a model's logits, which is called without
labels then, since its own loss is not wanted. The promise says what the labels would have said:
padding can be left out, and a head need not compute logits, also where nothing learns.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn

from rapidformer.accel.unpad.kernels import inside
from rapidformer.accel.unpad.rows import send
from rapidformer.accel.unpad.sides import is_encoder_decoder
from rapidformer.data.batch import find_host_copy
from rapidformer.models.own_loss import shifts_labels

_IGNORED = -100


class _Promise(NamedTuple):
    labels: Tensor | None
    """None if they do not stand where the model's own labels would."""


_PROMISE: ContextVar[_Promise | None] = ContextVar("promise", default=None)


def read_labelled(
    model: nn.Module, inputs: Mapping[str, Any], labels: Tensor, *, is_shifted: bool
) -> AbstractContextManager[None]:
    """Inside, a call of the model with these inputs returns logits of which only this is read."""
    lead = next((inputs[n] for n in ("attention_mask", "position_ids") if n in inputs), None)
    fits = isinstance(lead, Tensor) and lead.shape == labels.shape
    is_usual = fits and is_shifted == shifts_labels(model) and not is_encoder_decoder(model)
    return inside(_PROMISE, _Promise(labels if is_usual else None))


def is_promised() -> bool:
    """Whether only labelled tokens of the current call's logits are read."""
    return _PROMISE.get() is not None


def find_promised_labels(given: Mapping[str, Any]) -> Tensor | None:
    """The labels that a call was promised for, unless it has labels of its own."""
    promise = _PROMISE.get()
    return None if promise is None or given.get("labels") is not None else promise.labels


def find_labelled_rows(labels: Tensor, *, is_shifted: bool) -> Tensor | None:
    """Which of the flattened predictions have a label; None if the device would have to be asked.

    So it is for a step that a CUDA graph replays, where no tensor's size may depend on values.
    """
    known = find_host_copy(labels)
    if known is None:
        return None
    targets = known[:, 1:] if is_shifted else known
    return send((targets != _IGNORED).flatten().nonzero().squeeze(1), labels.device)
