"""The scan of Mamba-2 as matrix products.

A head's state decays by ``exp(dt A)`` and takes up ``dt B x`` at each token; its output is ``C``
times the state. Inside a chunk this is attention with scores that decay; from chunk to chunk, whole
states decay. transformers multiplies the same numbers one by one: for 8 rows of 1,000 tokens and 48
heads, a single product takes 48 GiB.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.scans.chunks import ROWS, add_up, cut, decay_between, decay_to_end


def scan_states(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - transformers passes some of these by name
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """What transformers' ``mamba2_chunk_scan`` returns, in fp32 as there.

    ``hidden_states`` are [rows, tokens, heads, size], ``B`` and ``C`` are [rows, tokens, groups,
    size of a state].
    """
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = functional.softplus(dt) if dt_softplus else dt
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float()
    with torch.autocast(hidden_states.device.type, enabled=False):
        inputs = hidden_states.float()
        taken, logs = inputs * dt[..., None], dt * A.float()
        output, final = _scan(taken, logs, B.float(), C.float(), initial_states)
        output = output if D is None else output + D[..., None] * inputs
    return (output, final) if return_final_states else output


def _scan(
    values: Tensor, logs: Tensor, keys: Tensor, queries: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output, and the states after the last token: [rows, heads, size, state]."""
    rows, tokens, heads, size = values.shape
    groups = keys.shape[2]
    in_groups = (groups, heads // groups)
    # [rows, chunks, groups, heads of the group, tokens of the chunk, size], or without heads.
    values = cut(values).unflatten(3, in_groups).permute(0, 1, 3, 4, 2, 5)
    sums = add_up(cut(logs).unflatten(3, in_groups).permute(0, 1, 3, 4, 2))
    keys, queries = cut(keys).transpose(2, 3), cut(queries).transpose(2, 3)
    scores = (queries @ keys.transpose(-1, -2)).unsqueeze(3) * decay_between(sums)
    inside = scores @ values

    at_end = values * decay_to_end(sums).unsqueeze(-1)
    added = at_end.transpose(-1, -2).flatten(3, 4) @ keys
    added = added.unflatten(3, (-1, size)).flatten(2, 3)
    states, final = _carry(added, sums[..., -1].flatten(2), first)
    before = states.unflatten(2, in_groups).flatten(3, 4)
    read = (queries @ before.transpose(-1, -2)).unflatten(4, (-1, size)).transpose(3, 4)
    output = inside + read * sums.float().exp().unsqueeze(-1)
    output = output.permute(0, 1, 4, 2, 3, 5).reshape(rows, -1, heads, size)
    return output[:, :tokens].contiguous(), final


def _carry(added: Tensor, logs: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states before each chunk, [rows, chunks, heads, size, state], and after the last one."""
    grid = ROWS.get()
    if grid is not None:
        added, logs = grid.spread(added), grid.spread(logs)
    shape = len(added), *added.shape[2:]
    start = added.new_zeros(shape) if first is None else first.to(added)
    of_chunks = add_up(functional.pad(logs.transpose(1, 2), (1, 0)))
    states = torch.cat([start.unsqueeze(1), added], 1).transpose(1, 2).flatten(3)
    states = decay_between(of_chunks) @ states
    states = states.unflatten(3, added.shape[3:]).transpose(1, 2)
    before = states[:, :-1]
    return before if grid is None else grid.collect(before), states[:, -1]
