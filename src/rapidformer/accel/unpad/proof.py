"""Check by a small batch whether the user's model gives the same results without padding.

The result holds for later weights and modes: what adds nothing yet, because a weight of it is zero,
gets another weight for the trial (``stirring.py``), frozen weights have gradients as well, and both
training and evaluation are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rapidformer.accel.assembly import Enter
from rapidformer.accel.unpad.sides import is_encoder_decoder
from rapidformer.accel.unpad.stirring import (
    FLOATS,
    SMOOTH,
    Steady,
    in_float64,
    is_library,
    keep_state,
    list_statistics,
    may_use_float64,
    stir,
    without_dropout,
)
from rapidformer.data.random_numbers import random_numbers_from
from rapidformer.dist.collectives import is_alone
from rapidformer.dist.whole import get_shard
from rapidformer.errors import ModelError
from rapidformer.models.evaluation_mode import evaluation_mode
from rapidformer.models.plan import ModelPlan
from rapidformer.models.towers import get_text_config
from rapidformer.overlay import get_own_class

_LENGTHS = (9, 4, 6)
_LIMIT = 1e-4
_LIMIT_16_BIT = 3e-2
_LIMIT_STIRRED_16_BIT = 0.1
"""The same with other weights than the model's own, with which rounding has more effect."""
_SPREAD = 2
"""Two results in 16 bits may differ by so many times what the model's own does from fp32."""
_FEW = 2**16
"""Up to so many numbers, a weight's gradient is compared in every block: those of gates, norms and
biases, each of which sums up over all tokens what its block has computed."""

Forward = Callable[[dict[str, Any]], Any]


def run_whole(batch: dict[str, Any]) -> AbstractContextManager[list[Tensor]]:
    """Inside, ``model.forward`` runs all of the model."""
    return nullcontext([])


def find_difference(
    model: nn.Module,
    plan: ModelPlan,
    forward: Forward,
    dtype: torch.dtype | None = None,
    *,
    is_packed: bool = False,
    sharing: dist.ProcessGroup | None = None,
    enter: Enter = run_whole,
) -> str | None:
    """How a forward pass differs from the model's own, also under autocast; None if it does not.

    ``sharing`` are the ranks that share each row, which all call this. Passes run inside ``enter``.
    """
    device = next(model.parameters()).device
    compare = functools.partial(_compare, model, plan, forward, sharing, enter)
    try:
        on_device = torch.random.fork_rng([device], enabled=device.type == "cuda")
        on_host = random_numbers_from((0,))
        with on_device, on_host, keep_state(model), torch.enable_grad(), SMOOTH:
            batch = _make_batch(model, is_packed=is_packed)
            is_rounded = dtype is not None and any(p.dtype == dtype for p in model.parameters())
            in_16_bit = dtype is not None and (is_rounded or device.type == "cuda")
            difference = None
            if not is_rounded:  # frozen weights in 16 bits do not meet fp32 outside autocast
                # Packed examples show what the model makes of positions; the rest is shown by then.
                with stir(model):
                    difference = compare(batch, in_training=not is_packed)
                    is_own = not all(is_library(get_own_class(m)) for m in model.modules())
                    if difference is None and is_own and not is_packed and not in_16_bit:
                        difference = compare(batch, has_gradients=False)
            if difference is None and in_16_bit:
                with torch.autocast(device.type, dtype=dtype):
                    difference = compare(batch, limit=_LIMIT_16_BIT)
                    if difference is None and is_rounded and not is_packed:
                        with stir(model):
                            difference = compare(
                                batch, in_training=True, limit=_LIMIT_STIRRED_16_BIT
                            )
            return difference
    except ModelError as error:
        return str(error)
    except Exception as error:  # a model's code may raise anything on tensors it does not expect
        reason = str(error).splitlines()[0] if str(error) else ""
        return f"it fails with {type(error).__name__}: {reason}"


def call_plainly(model: nn.Module, batch: dict[str, Any]) -> Any:
    """A forward pass of a model as it is."""
    # Not model(...): a user's hooks must not see a batch that is not theirs.
    return model.forward(**batch)


def _compare(
    model: nn.Module,
    plan: ModelPlan,
    forward: Forward,
    sharing: dist.ProcessGroup | None,
    enter: Enter,
    batch: dict[str, Any],
    *,
    in_training: bool = False,
    has_gradients: bool = True,
    limit: float = _LIMIT,
) -> str | None:
    """Compare the logits, and the gradients of ``_choose_weights`` if asked to."""
    blocks = plan.get_blocks(model)
    # Rounding by itself changes the gradients of some weights in 16 bits by more than this limit.
    most = 0 if limit == _LIMIT_16_BIT else _FEW
    weights = _choose_weights(blocks, most) if has_gradients else []
    rows = batch["input_ids"].shape
    own = [m for block in blocks for m in block.modules() if not is_library(get_own_class(m))]
    statistics = list_statistics(blocks)

    def run(forward: Forward, *tokens: Any) -> list[Tensor]:
        compute = functools.partial(_run, forward, batch, weights, enter)
        found = _run_steadily(compute, model, Steady(model, *tokens)) if in_training else compute()
        for gradient in found[1:] if sharing is not None else ():
            dist.all_reduce(get_shard(gradient), group=sharing)  # each rank has that of its tokens
        return found

    with evaluation_mode(model), _needing_gradients(weights):
        model.train(in_training)
        expected = run(functools.partial(call_plainly, model), rows, own)
        changed = run(forward)
        if expected[0].dtype in (torch.float16, torch.bfloat16):
            limit = max(limit, _LIMIT_16_BIT)
        problem = _describe_difference(changed, expected, limit)
        # Some models amplify rounding. Of several ranks, all or none would have to compute it.
        if problem is not None and is_alone():
            plain = functools.partial(run, functools.partial(call_plainly, model), rows, own)
            # Code may fail in another precision than its own: the difference stands then.
            with suppress(Exception):
                if limit == _LIMIT_16_BIT:
                    with torch.autocast(expected[0].device.type, enabled=False):
                        exact = plain()
                    problem = _describe_difference(changed, expected, limit, exact)
                elif limit == _LIMIT and may_use_float64(model):
                    with in_float64(model):
                        exact = plain()
                        problem = _describe_difference(run(forward), exact, limit)
    # A mean over tokens may meet nothing but later evaluations.
    if list_statistics(blocks) != statistics:
        return "its blocks keep statistics of what they compute"
    return problem


def _describe_difference(
    changed: Sequence[Tensor], expected: Sequence[Tensor], limit: float,
    exact: Sequence[Tensor] | None = None,
) -> str | None:  # fmt: skip
    """What differs; with ``exact`` results in fp32, by more than rounding changes."""
    names = ["logits", *["gradients"] * (len(expected) - 1)]
    sizes = [float(each.abs().max()) for each in expected]
    # A gradient that is zero in theory, such as that of the key bias, is nothing but noise. It is
    # compared relative to the largest gradient instead.
    least = (0.01 if limit == _LIMIT else 0.1) * max(sizes[1:], default=0.0)
    rounding = [0.0] * len(sizes)
    if exact is not None:
        rounding = [float((b - c).abs().max()) for b, c in zip(expected, exact, strict=True)]
    rows = zip(names, changed, expected, sizes, rounding, strict=True)
    for name, mine, theirs, size, rounded in rows:
        scale = size if name == "logits" else max(size, least)
        allowed = max(limit * max(scale, 1e-3), _SPREAD * rounded)
        if not (mine - theirs).abs().max() <= allowed:
            return f"{name} differ"
    return None


def _choose_weights(blocks: Sequence[nn.Module], most: int) -> list[Tensor]:
    """Of the first and the last block, all that are trained; of every block, all small ones.

    These have at most so many numbers.
    """
    of_ends = {id(p) for block in (blocks[0], blocks[-1]) for p in block.parameters()}
    weights = {id(p): p for block in blocks for p in block.parameters() if p.dtype in FLOATS}
    return [
        weight
        for key, weight in weights.items()
        if weight.numel() <= most or (weight.requires_grad and key in of_ends)
    ]


@contextmanager
def _needing_gradients(weights: Sequence[Tensor]) -> Iterator[None]:
    """Inside, these weights have gradients: a frozen one may be trained later."""
    frozen = [weight for weight in weights if not weight.requires_grad]
    try:
        for weight in frozen:
            weight.requires_grad_(True)
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


def _make_batch(model: Any, *, is_packed: bool) -> dict[str, Any]:
    config = get_text_config(model.config)
    words = min(int(getattr(config, "vocab_size", 0)), 1000)
    if words < 20:
        raise ModelError("its configuration has no vocab_size, or one below 20")
    device = next(model.parameters()).device
    ids = torch.randint(10, words, (len(_LENGTHS), max(_LENGTHS))).to(device)
    mask = (torch.arange(max(_LENGTHS)) < torch.tensor(_LENGTHS)[:, None]).to(device)
    if is_packed:  # the same tokens as three examples in one row, whose positions restart
        positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None].to(device)
        return {"input_ids": ids[mask][None], "position_ids": positions, "use_cache": False}
    pad = getattr(config, "pad_token_id", None)
    ids = ids.masked_fill(~mask, 0 if pad is None or pad < 0 else pad)
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    if not is_encoder_decoder(model):
        return batch
    # Labels of a decoder: the same tokens, but with other row lengths than the encoder's.
    labels = ids.flip(0).masked_fill(~mask.flip(0), -100)
    return {**batch, "labels": labels, "use_cache": False}


def _run(
    forward: Forward, batch: dict[str, Any], weights: Sequence[Tensor], enter: Enter
) -> list[Tensor]:
    """The logits of real tokens, and the gradients of ``weights`` and of what is entered with."""
    with enter(batch) as received:
        return _differentiate(forward(dict(batch)), batch, [*weights, *received])


def _run_steadily(
    compute: Callable[[], list[Tensor]], model: nn.Module, steady: Steady
) -> list[Tensor]:
    """What a pass computes inside ``steady``, which takes as long again as the pass itself.

    Without code of the user's own, it only replaces random numbers: a pass that has drawn none is
    the same without it. Ranks pass together, and might not all draw: each of them is steady.
    """
    if is_alone() and all(is_library(get_own_class(module)) for module in model.modules()):
        device = next(model.parameters()).device
        with without_dropout(model):
            before = _read_generators(device)
            found = compute()
        if all(map(torch.equal, before, _read_generators(device))):
            return found
    with steady:
        return compute()


def _read_generators(device: torch.device) -> list[Tensor]:
    states = [torch.default_generator.get_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _differentiate(outputs: Any, batch: dict[str, Any], weights: Sequence[Tensor]) -> list[Tensor]:
    if hasattr(outputs, "start_logits"):
        raise ModelError("its loss compares all positions of a row, padding included")
    # A model without a head is used for its hidden states, which is all that a stage returns.
    logits = getattr(outputs, "logits", getattr(outputs, "last_hidden_state", outputs))
    if "labels" in batch:
        logits = logits[batch["labels"] != -100]
    elif logits.dim() == 3 and "attention_mask" in batch:
        logits = logits[batch["attention_mask"].bool()]
    direction = torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)
    # The loss is a weighted sum with different weights, so that differences cannot cancel out.
    loss = (logits.float() * direction).sum()
    gradients = torch.autograd.grad(loss, weights, allow_unused=True) if weights else ()
    return [logits.detach(), *(g if g is not None else torch.zeros(()) for g in gradients)]
