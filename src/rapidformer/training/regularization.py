"""Label smoothing and NEFTune noise as hooks on the model, so that every front end has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.hooks import RemovableHandle

from rapidformer.config.sections import TrainingLengthArguments
from rapidformer.errors import ConfigurationError
from rapidformer.log import warn_once
from rapidformer.models.own_loss import shifts_labels


@contextmanager
def regularize(
    model: nn.Module, args: TrainingLengthArguments, *, smooths_labels: bool = True
) -> Iterator[None]:
    """Smooth labels and add noise if the settings ask for it."""
    with ExitStack() as hooks:
        if args.label_smoothing and smooths_labels:
            hooks.enter_context(_smooth_labels(model, args.label_smoothing))
        if args.neftune_noise_alpha:
            hooks.enter_context(_add_noise(model, args.neftune_noise_alpha))
        yield


def _smooth_labels(model: nn.Module, smoothing: float) -> RemovableHandle:
    """Cross entropy against labels of which a fraction is spread over all classes."""
    is_shifted = shifts_labels(model)

    def replace_loss(
        module: nn.Module, inputs: Any, settings: Mapping[str, Any], output: Any
    ) -> Any:
        labels = settings.get("labels")
        if labels is None or labels.is_floating_point():
            if module.training:
                warn_once("--label-smoothing has no effect: the model gets no classes as labels.")
            return output
        logits, rest = _split_output(output)
        if not isinstance(logits, torch.Tensor):
            if module.training:
                warn_once("--label-smoothing has no effect: the model returns no logits.")
            return output
        if is_shifted:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        rows = logits.reshape(-1, logits.shape[-1]).float()
        loss = cross_entropy(rows, labels.reshape(-1), label_smoothing=smoothing)
        if isinstance(output, tuple):
            return loss, *rest
        output["loss"] = loss
        return output

    return model.register_forward_hook(replace_loss, with_kwargs=True)


def _split_output(output: Any) -> tuple[Any, tuple[Any, ...]]:
    """The logits of an output with names or without, and a tuple's parts besides its loss."""
    if isinstance(output, Mapping):
        return output.get("logits"), ()
    if not isinstance(output, tuple):
        return None, ()
    has_loss = output[:1] and isinstance(output[0], torch.Tensor) and not output[0].dim()
    rest = output[1:] if has_loss else output
    return next(iter(rest), None), rest


def _add_noise(model: nn.Module, alpha: float) -> RemovableHandle:
    """Uniform noise of size alpha / sqrt(tokens x width) on the input embeddings."""
    find: Any = getattr(model, "get_input_embeddings", None)
    if find is None:
        raise ConfigurationError(
            f"--neftune-noise-alpha: {type(model).__name__} has no get_input_embeddings(), so "
            "there is nothing to add the noise to."
        )
    return find().register_forward_hook(_Noise(alpha))


@dataclass(frozen=True)
class _Noise:
    """A hook on the input embeddings."""

    alpha: float
    reads_width: ClassVar[bool] = True

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        size = self.alpha / (output.shape[1] * output.shape[2]) ** 0.5
        return output + torch.empty_like(output).uniform_(-size, size)
