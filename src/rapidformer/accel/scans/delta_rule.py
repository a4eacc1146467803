"""The gated delta rule (Qwen3.5, Qwen3-Next, OLMo hybrid): all of it but the states, in products.

A head's state maps keys to values. At each token it decays, and what it holds for the token's key
moves towards the token's value. A triangular system says what all tokens of a chunk write together,
up to what the state before the chunk held; so only the states are computed one after the other.
transformers also computes the outputs chunk by chunk, and writes them into one tensor, which
autograd copies whole for each chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from rapidformer.accel.scans.chunks import ROWS, add_up, cut, decay_between, decay_to_end


def apply_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers' ``torch_chunk_gated_delta_rule`` returns, in fp32 until the end.

    ``query`` and ``key`` are [rows, tokens, heads, size], ``g`` (the logarithm of what is kept) and
    ``beta`` [rows, tokens, heads].
    """
    dtype = query.dtype
    with torch.autocast(query.device.type, enabled=False):
        query, key, value, g, beta = (part.float() for part in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = _normalize(query), _normalize(key)
        output, final = _scan(query * query.shape[-1] ** -0.5, key, value, g, beta, initial_state)
    return output.to(dtype).contiguous(), final if output_final_state else None


def _normalize(values: Tensor) -> Tensor:
    return values * torch.rsqrt(values.square().sum(-1, keepdim=True) + 1e-6)


def _scan(
    query: Tensor, key: Tensor, value: Tensor, logs: Tensor, beta: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output, and the states after the last token: [rows, heads, size of a key, of a value]."""
    rows, tokens, heads, size = value.shape
    # [chunks, rows and heads, tokens of the chunk, size]
    query, key, value, beta = (_arrange(part) for part in (query, key, value, beta.unsqueeze(-1)))
    sums = add_up(_arrange(logs.unsqueeze(-1)).squeeze(-1))
    decay, kept = decay_between(sums), sums.float().exp().unsqueeze(-1)
    erasing = key * beta
    system = (erasing @ key.transpose(-1, -2)) * decay
    solved = torch.linalg.solve_triangular(
        system, torch.cat([value * beta, erasing * kept], -1), upper=False, unitriangular=True
    )
    written, erased = solved.split([size, key.shape[-1]], -1)
    to_end = decay_to_end(sums).unsqueeze(-1)
    states, values, final = _carry(written, erased, key * to_end, kept[:, :, -1], first)
    read = (query * kept) @ states
    output = read + ((query @ key.transpose(-1, -2)) * decay) @ values
    output = output.unflatten(1, (rows, heads)).permute(1, 0, 3, 2, 4)
    return output.flatten(1, 2)[:, :tokens], final.unflatten(0, (rows, heads))


def _carry(
    written: Tensor, erased: Tensor, keys: Tensor, kept: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The states before each chunk, what it writes, and the states after the last one."""
    grid, heads = ROWS.get(), written.shape[1]
    parts = [written, erased, keys, kept]
    if grid is not None:  # [chunks, heads, ...] -> [chunks of a row, rows and heads, ...]
        parts = [grid.spread(part[None]).transpose(0, 1).flatten(1, 2) for part in parts]
    size = keys.shape[-1], written.shape[-1]
    start = keys.new_zeros(parts[0].shape[1], *size) if first is None else first.flatten(0, 1)
    states, values = _Carry.apply(*parts, start.to(keys))
    before, final = states[:-1], states[-1]
    if grid is None:
        return before, values, final
    before, values = (
        grid.collect(part.unflatten(1, (-1, heads)).transpose(0, 1)).squeeze(0)
        for part in (before, values)
    )
    return before, values, final[:heads]  # nobody asks for the states after several rows


def _arrange(values: Tensor) -> Tensor:
    return cut(values).permute(1, 0, 3, 2, 4).flatten(1, 2)


class _Carry(Function):
    """The states before each chunk and after the last one, and the values that are written."""

    @staticmethod
    def forward(
        written: Tensor, erased: Tensor, keys: Tensor, kept: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor]:
        states = start.new_empty(len(keys) + 1, *start.shape)
        values = torch.empty_like(written, memory_format=torch.contiguous_format)
        states[0] = start
        for number, key in enumerate(keys):
            write, erase, state = written[number], erased[number], states[number]
            torch.baddbmm(write, erase, state, alpha=-1, out=values[number])
            decayed = state * kept[number].unsqueeze(-1)
            torch.baddbmm(decayed, key.transpose(1, 2), values[number], out=states[number + 1])
        return states, values

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        _, *others, _ = inputs
        ctx.save_for_backward(*others, *output)

    @staticmethod
    def backward(ctx: Any, of_states: Tensor, of_values: Tensor) -> tuple[Tensor, ...]:
        erased, keys, kept, states, values = ctx.saved_tensors
        whole, written = [of_states[-1]], []  # gradients of states and of writes, from the end
        for number in reversed(range(len(keys))):
            of_write = torch.baddbmm(of_values[number], keys[number], whole[-1])
            decayed = torch.addcmul(of_states[number], whole[-1], kept[number].unsqueeze(-1))
            erase = erased[number].transpose(1, 2)
            whole.append(torch.baddbmm(decayed, erase, of_write, alpha=-1))
            written.append(of_write)
        before, after = states[:-1], torch.stack(whole[-2::-1])
        of_written = torch.stack(written[::-1])
        of_erased = -(of_written @ before.transpose(-1, -2))
        of_keys = values @ after.transpose(-1, -2)
        of_kept = (after * before).sum((-1, -2)).unsqueeze(-1)
        return of_written, of_erased, of_keys, of_kept, whole[-1]
