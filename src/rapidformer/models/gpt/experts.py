"""A mixture of experts: each token goes through the few feed-forward networks its router picks.

No token is dropped and no expert is padded: tokens are sorted by expert and each expert multiplies
its own rows. An expert without tokens still takes part with zero rows, so its weights get a zero
gradient in every step, and ranks that sum gradients never wait for a missing one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.dist.context_region import ContextRegion
from rapidformer.models.gpt.configuration import GPTConfig


def activate(up: Tensor, gate: Tensor | None) -> Tensor:
    """GELU in Megatron's (and GPT-2's) tanh form; SwiGLU if there is a gate."""
    if gate is None:
        return functional.gelu(up, approximate="tanh")
    return functional.silu(gate) * up


class MixtureOfExperts(nn.Module):
    """Returns the mixed output and the load-balancing loss."""

    context_region: ContextRegion | None = None
    """Set if a micro-batch's tokens are split over ranks: the loss then covers all of them."""

    def __init__(self, config: GPTConfig, num_experts: int) -> None:
        super().__init__()
        self.top_k = config.moe_router_topk
        # Both losses leave as one number, which is later multiplied by the first coefficient.
        self.z_loss_ratio = config.moe_z_loss_coeff / (config.moe_loss_coeff or 1.0)
        self.router = nn.Linear(config.hidden_size, num_experts, bias=False)
        self.experts = Experts(config, num_experts)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        tokens = hidden.flatten(0, -2)
        logits = self._route(tokens)
        probabilities = logits.softmax(dim=-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        if self.top_k > 1:
            # With one expert, the probability itself is the weight; otherwise the router learns
            # nothing.
            weights = weights / weights.sum(dim=-1, keepdim=True)
        by_expert, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(logits.shape[-1], device=hidden.device)
        ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
        # Copied for each choice and then permuted, not indexed: the backward pass of a permutation
        # adds nothing up, so it gives the same bits on every device and in every run.
        copies = tokens.unsqueeze(1).expand(-1, self.top_k, -1).flatten(0, 1)
        rows = self.experts(copies.index_select(0, order), ends)
        mixed = rows.index_select(0, order.argsort()).unflatten(0, (-1, self.top_k))
        output = (mixed * weights.unsqueeze(-1)).sum(dim=1)
        loss = self._compute_loss(probabilities, logits, ends)
        return output.to(hidden.dtype).view_as(hidden), loss

    def _compute_loss(self, probabilities: Tensor, logits: Tensor, ends: Tensor) -> Tensor:
        region = self.context_region
        if region is None or not region.length:
            loss = compute_balance_loss(probabilities, ends)
            if self.z_loss_ratio:
                loss = loss + self.z_loss_ratio * logits.logsumexp(dim=-1).square().mean()
            return loss
        squares = logits.logsumexp(dim=-1).square().sum()
        # The sum over all tokens, with its gradient; and the counts, which have none.
        sums = region.sum(torch.cat([probabilities.sum(dim=0), squares[None]]))
        all_ends = region.sum(ends.to(sums.dtype))
        means = sums * (self.top_k / all_ends[-1])
        return compute_balance_loss(means[None, :-1], all_ends) + self.z_loss_ratio * means[-1]

    def _route(self, tokens: Tensor) -> Tensor:
        """Scores in fp32 whatever the precision: rounding here would send tokens elsewhere."""
        with torch.autocast(tokens.device.type, enabled=False):
            return functional.linear(tokens.float(), self.router.weight.float())


class Experts(nn.Module):
    """Feed-forward networks side by side: one weight for all experts, without biases."""

    def __init__(self, config: GPTConfig, num_experts: int) -> None:
        super().__init__()
        assert config.ffn_hidden_size is not None
        size, width = config.hidden_size, config.ffn_hidden_size
        into, out_of = (num_experts, size, width), (num_experts, width, size)
        self.gate = nn.Parameter(torch.empty(into)) if config.swiglu else None
        self.up = nn.Parameter(torch.empty(into))
        self.down = nn.Parameter(torch.empty(out_of))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows sorted by expert; ``ends[i]`` is where the rows of expert i end."""
        gate = multiply_stretches(rows, self.gate, ends) if self.gate is not None else None
        inner = activate(multiply_stretches(rows, self.up, ends), gate)
        return multiply_stretches(inner, self.down, ends)


def compute_balance_loss(probabilities: Tensor, ends: Tensor) -> Tensor:
    """experts x sum(fraction of choices x mean probability): 1 if all are equally loaded."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    fractions = counts / ends[-1]
    return len(ends) * (fractions * probabilities.mean(dim=0)).sum()


def multiply_stretches(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows times its weight: [rows, in] x [experts, in, out] -> [rows, out]"""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        # Grouped products are not on autocast's list.
        dtype = torch.get_autocast_dtype(kind)
        rows, weights = rows.to(dtype), weights.to(dtype)
    # torch has one kernel for all experts if they are bf16 on a GPU, with rows aligned to 16 bytes.
    is_aligned = all(size % 8 == 0 for size in weights.shape[1:])
    if (rows.is_cuda or rows.is_meta) and rows.dtype is torch.bfloat16 and is_aligned:
        product: Tensor = functional.grouped_mm(rows, weights, offs=ends)
    else:
        product = _multiply_in_turn(rows, weights, ends)
    return product


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _multiply_in_turn(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    # On a GPU this waits for the sizes; compiled, every new size would recompile.
    if rows.is_meta:  # without values, all experts get the same number of rows
        parts = rows.tensor_split(len(weights))
    else:
        parts = rows.split(torch.diff(ends, prepend=ends.new_zeros(1)).tolist())
    stretches = zip(parts, weights.unbind(), strict=True)
    return torch.cat([stretch @ weight for stretch, weight in stretches])
