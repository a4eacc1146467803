"""DeBERTa's attention to relative positions, without gathering scores.

DeBERTa multiplies all queries and keys by the embeddings of all distances, and gathers for each
pair of tokens the scores of its distance. Here the embeddings are gathered instead, in the order of
the distances. A token's scores are then a row of a matrix whose next row is shifted by one place,
and those of all pairs can be read off it. They are a bias for fused attention. What DeBERTa
copies to the device in each step, which a CUDA graph cannot replay, is not needed.

Without padding, rows are put side by side for attention alone: [rows, longest row].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.unpad.kernels import make_current_mask
from rapidformer.accel.unpad.masks import RowMask
from rapidformer.accel.unpad.places import gather, scatter
from rapidformer.compat.transformers_models import (
    find_unknown_attention,
    find_unknown_disentangled,
    get_attention_table,
    is_disentangled_attention,
    is_disentangled_classifier,
)
from rapidformer.data.batch import IGNORED_LABEL
from rapidformer.overlay import extend, get_own_class, list_layers

_LAYER = "positions"


def apply(assembly: Assembly) -> str | None:
    """Replace the attention of DeBERTa's layers."""
    layers = _find_layers(assembly.model)
    if not layers:
        return None
    problem = find_unknown_attention() or find_unknown_disentangled(get_own_class(layers[0]))
    if problem is not None:
        return f"off: {problem}"
    return f"{apply_disentangled(assembly.model)} layers"


def apply_disentangled(model: nn.Module) -> int:
    """The same for any model; returns how many layers it has."""
    layers = _find_layers(model)
    for layer in layers:
        extend(layer, _LAYER, _build_attention, is_shared=True)
    for module in model.modules() if layers else ():
        if hasattr(module, "get_rel_pos") and hasattr(module, "get_rel_embedding"):
            extend(module, _LAYER, _build_encoder, is_shared=True)
        elif is_disentangled_classifier(get_own_class(module)):
            extend(module, _LAYER, _build_classifier, is_shared=True)
    return len(layers)


def is_applied(model: nn.Module) -> bool:
    """Whether a model's attention was replaced."""
    return any(_LAYER in list_layers(module) for module in model.modules())


def _find_layers(model: nn.Module) -> list[Any]:
    """DeBERTa's attention layers that we know: others mix heads, or scale scores differently."""
    modules: list[Any] = list(model.modules())
    return [
        module
        for module in modules
        if is_disentangled_attention(get_own_class(module))
        and module.relative_attention
        and not getattr(module, "talking_head", False)
        and {*module.pos_att_type} <= {"c2p", "p2c"}
    ]


def _build_encoder(cls: Any) -> dict[str, Any]:
    def get_attention_mask(self: Any, attention_mask: Tensor) -> Any:
        mask = make_current_mask(attention_mask)
        return cls.get_attention_mask(self, attention_mask) if mask is None else mask

    def get_rel_pos(
        self: Any, hidden_states: Tensor, query_states: Any = None, relative_pos: Any = None
    ) -> Tensor:
        if query_states is not None or relative_pos is not None:
            return cls.get_rel_pos(self, hidden_states, query_states, relative_pos)
        mask = make_current_mask(hidden_states[..., 0])
        size = hidden_states.shape[1] if mask is None else _read_rows(mask)[1]
        buckets = getattr(self, "position_buckets", -1)
        return index_distances(size, buckets, self.max_relative_positions, hidden_states.device)

    def get_rel_embedding(self: Any) -> Tensor:
        # In four dimensions: of fewer, it could be taken for an argument with a value per token.
        embeddings: Tensor = cls.get_rel_embedding(self)
        return embeddings[None, None]

    return {
        "get_attention_mask": get_attention_mask,
        "get_rel_pos": get_rel_pos,
        "get_rel_embedding": get_rel_embedding,
    }


def index_distances(size: int, buckets: int, longest: int, device: torch.device) -> Tensor:
    """Which embedding belongs to each distance from ``-size`` to ``size``.

    As DeBERTa's ``make_log_bucket_position``, operation by operation, so that no distance gets
    another bucket by rounding; but with numbers where it copies tensors to the device.
    """
    distances = torch.arange(-size, size + 1, device=device)
    span = buckets if buckets > 0 else longest
    if buckets > 0 and longest > 0:
        middle = buckets // 2
        is_near = (distances < middle) & (distances > -middle)
        far = torch.where(is_near, middle - 1, distances.abs())
        largest = torch.log(torch.tensor((longest - 1) / middle, device="cpu")).item()
        logarithms = torch.ceil(torch.log(far / middle) / largest * (middle - 1)) + middle
        signed = logarithms * torch.sign(distances)
        distances = torch.where(far <= middle, distances.type_as(signed), signed).long()
    return torch.clamp(distances + span, 0, 2 * span - 1)


def _build_classifier(cls: Any) -> dict[str, Any]:
    """The loss over rows that have a label, without asking the device which ones these are."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        is_usual = self.config.problem_type is None and self.num_labels > 1
        if not isinstance(labels, Tensor) or labels.dim() != 1 or not is_usual:
            return cls.forward(self, *args, **kwargs)
        output = cls.forward(self, *args, **{**kwargs, "labels": None})
        is_labelled = labels >= 0
        targets = labels.long().where(is_labelled, IGNORED_LABEL)
        losses = functional.cross_entropy(output[0].float(), targets, reduction="sum")
        loss = losses / is_labelled.sum().clamp(min=1)
        is_tuple = isinstance(output, tuple)
        return (loss, *output) if is_tuple else type(output)(loss=loss, **output)

    return {"forward": forward}


def _build_attention(cls: Any) -> dict[str, Any]:
    table = get_attention_table()

    @functools.wraps(cls.forward)
    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Any,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if relative_pos is None or rel_embeddings is None or relative_pos.dim() != 1:
            embeddings = None if rel_embeddings is None else rel_embeddings.flatten(0, -2)
            return cls.forward(
                self, hidden_states, attention_mask, output_attentions, query_states,
                relative_pos, embeddings,
            )  # fmt: skip
        if output_attentions or query_states is not None:
            return cls.forward(
                self, hidden_states, attention_mask, output_attentions, query_states,
                _spread_distances(relative_pos, _get_span(self)), rel_embeddings.flatten(0, -2),
            )  # fmt: skip
        embeddings = self.pos_dropout(rel_embeddings.flatten(0, -2))
        positions = embeddings[: 2 * _get_span(self)].index_select(0, relative_pos)
        # Looked up at each call: inside a call of ours, it may be another one.
        attend = table["sdpa"]
        return _attend(self, hidden_states, attention_mask, positions, attend), None

    return {"forward": forward}


def _spread_distances(positions: Tensor, span: int) -> Tensor:
    """What DeBERTa's own code takes: a bucket for each pair of tokens."""
    size = (len(positions) - 1) // 2
    tokens = torch.arange(size, device=positions.device)
    return (positions[tokens[:, None] - tokens[None] + size] - span)[None]


def _get_span(attention: Any) -> int:
    """How many embeddings there are for each direction."""
    return int(getattr(attention, "pos_ebd_size", attention.max_relative_positions))


def _attend(
    attention: Any, hidden: Tensor, mask: Any, positions: Tensor, attend: Callable[..., Any]
) -> Tensor:
    """Attention of [rows, tokens, width], given the embeddings of all distances."""
    shape = attention.num_attention_heads, attention.attention_head_size
    tokens = _project_tokens(attention, hidden)
    places = None
    if isinstance(mask, RowMask):
        ends, longest = _read_rows(mask)
        places, seen = _lay_out(ends, longest, hidden.shape[1])
        size = (len(ends) - 1) * longest
        tokens = [
            scatter(part.flatten(2), places, size).view(len(ends) - 1, longest, *shape)
            for part in tokens
        ]
    else:
        seen = mask.bool()
    query, key, value = tokens
    of_keys, of_queries = _project_positions(attention, positions)
    count = 1 + (of_keys is not None) + (of_queries is not None)
    scale = 1 / math.sqrt(shape[1] * count)
    scores = []
    if of_keys is not None:  # places of a row are keys from left to right, so distances fall
        scores.append(_score(query, of_keys[:-1].flip(0)))
    if of_queries is not None:
        scores.append(_score(key, of_queries[1:]).transpose(2, 3))
    attended = attend(
        attention, *(part.transpose(1, 2) for part in (query, key, value)), seen,
        position_bias=sum(scores[1:], scores[0]) * scale if scores else None, scaling=scale,
        dropout=attention.dropout.p if attention.training else 0.0, is_causal=False,
    )[0].flatten(2)  # fmt: skip
    return attended if places is None else gather(attended.flatten(0, 1)[None], places)


def _project_tokens(attention: Any, hidden: Tensor) -> list[Tensor]:
    """Queries, keys and values, [rows, tokens, heads, size]."""
    heads = attention.num_attention_heads
    if not hasattr(attention, "in_proj"):
        layers = (attention.query_proj, attention.key_proj, attention.value_proj)
        return [layer(hidden).unflatten(-1, (heads, -1)) for layer in layers]
    query, key, value = attention.in_proj(hidden).unflatten(-1, (heads, -1)).chunk(3, -1)
    biases = (each.view(heads, -1) for each in (attention.q_bias, attention.v_bias))
    return [query + next(biases), key, value + next(biases)]


def _project_positions(attention: Any, table: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Embeddings as keys (for queries to meet) and as queries, [distances, heads, size]."""
    if hasattr(attention, "in_proj"):
        names = ("pos_proj", "pos_q_proj")
    elif attention.share_att_key:
        names = ("key_proj", "query_proj")
    else:
        names = ("pos_key_proj", "pos_query_proj")
    kinds = [kind in attention.pos_att_type for kind in ("c2p", "p2c")]
    of_keys, of_queries = (
        getattr(attention, name)(table).unflatten(-1, (attention.num_attention_heads, -1))
        if is_used
        else None
        for name, is_used in zip(names, kinds, strict=True)
    )
    return of_keys, of_queries


def _score(tokens: Tensor, distances: Tensor) -> Tensor:
    """Products of [rows, size, heads, n] with [2 size, heads, n]: [rows, heads, size, size]."""
    products = tokens.permute(2, 0, 1, 3).flatten(1, 2).bmm(distances.permute(1, 2, 0))
    return _align(products, len(tokens))


# An operator: torch.compile would spend seconds on its sizes.
@torch.library.custom_op("rapidformer::align_scores", mutates_args=())
def _align(products: Tensor, rows: int) -> Tensor:
    return _view_aligned(products, rows).contiguous()


def _view_aligned(products: Tensor, rows: int) -> Tensor:
    """[heads, rows x size, 2 size] -> [rows, heads, size, size].

    The first token takes the second half of its products, and each further one those that begin one
    place earlier.
    """
    heads, _, width = products.shape
    size = width // 2
    products = products.contiguous().view(heads, rows, size * width)
    shifted = products[..., size - 1 : size * width - 1].view(heads, rows, size, width - 1)
    return shifted[..., :size].transpose(0, 1)


@torch.library.custom_op("rapidformer::align_scores_backward", mutates_args=())
def _align_backward(gradient: Tensor) -> Tensor:
    rows, heads, size, _ = gradient.shape
    of_products = gradient.new_zeros(heads, rows * size, 2 * size)
    _view_aligned(of_products, rows).copy_(gradient)
    return of_products


@_align.register_fake
def _(products: Tensor, rows: int) -> Tensor:
    size = products.shape[2] // 2
    return products.new_empty(rows, products.shape[0], size, size)


@_align_backward.register_fake
def _(gradient: Tensor) -> Tensor:
    rows, heads, size, _ = gradient.shape
    return gradient.new_empty(heads, rows * size, 2 * size)


_align.register_autograd(lambda ctx, gradient: (_align_backward(gradient), None))


def _read_rows(mask: RowMask) -> tuple[Tensor, int]:
    """The ends of rows, and the longest: of compiled or recorded blocks, one of a few."""
    if mask.fused is not None:
        return mask.fused.ends, mask.fused.longest
    return mask.rows.ends, mask.rows.longest


def _lay_out(ends: Tensor, longest: int, count: int) -> tuple[Tensor, Tensor]:
    """Where tokens stand in [rows, longest], and which of these places are seen in each row."""
    tokens = torch.arange(count, device=ends.device)
    row = torch.searchsorted(ends[1:], tokens, right=True)
    places = row * longest + tokens - ends[row]
    lengths = ends.diff()[:, None, None, None]
    columns = torch.arange(longest, device=ends.device)
    # An empty row sees itself: a softmax over nothing would be NaN.
    return places, (columns < lengths) | (lengths == 0)
