"""What every parity test compares with: a loop of torch, in one process, without the library."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from rapidformer.models.plan import find_tied
from rapidformer.verification.recorder import collect_gradients, collect_weights, count_bytes
from rapidformer.verification.trace import Trace
from tests.parity.models import Rows, collate


def run_bare(
    model: nn.Module,
    updates: list[list[Rows]],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    clip: float = 1.0,
) -> Trace:
    """Train; an update is its micro-batches, mostly one: the whole global batch."""
    optimizer = make_optimizer(model)
    trace = start_bare_trace(model)
    trace.facts["parameter_bytes"] = count_bytes(model)
    model.train()
    for micro_batches in updates:
        loss = _accumulate(model, [collate(rows) for rows in micro_batches])
        note_bare_gradients(trace, model, loss)
        trace.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = collect_weights(model)
    return trace


def _accumulate(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The backward pass of an update; its loss, a mean over its labels."""
    if len(batches) == 1:
        loss: torch.Tensor = model(**batches[0])["loss"]
        loss.backward()
        return loss
    loss_sum, count = torch.zeros(()), 0
    for batch in batches:
        weight = count_labels(batch["labels"], is_shifted=True)
        if weight:
            loss = model(**batch)["loss"] * weight
            loss.backward()
            loss_sum, count = loss_sum + loss.detach(), count + weight
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= count
    return loss_sum / count


def count_labels(labels: torch.Tensor, *, is_shifted: bool) -> int:
    return int(((labels[:, 1:] if is_shifted else labels) != -100).sum())


def start_bare_trace(model: nn.Module) -> Trace:
    """What comes before the first update of a loop without the library."""
    return Trace(start=collect_weights(model), ties=find_tied(model))


def note_bare_gradients(trace: Trace, model: nn.Module, loss: torch.Tensor) -> None:
    """Take down an update of such a loop, before it clips."""
    trace.losses.append((loss.item(), 1.0))
    trace.samples.append((0, 0))
    trace.gradients.append(collect_gradients(model))
