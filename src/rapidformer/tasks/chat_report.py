"""What is said before training on conversations: what is left out, what is learnt, how it packs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.errors import DataError
from rapidformer.log import get_logger
from rapidformer.tasks.chat_rows import name_rows

if TYPE_CHECKING:
    from rapidformer.tasks.chat_features import ChatEncoder


def tell_left_out(reasons: Sequence[str], split: str) -> None:
    """Which examples are left out and why; an error where that is all of them."""
    by_reason: dict[str, list[int]] = defaultdict(list)
    for number, reason in enumerate(reasons, start=1):
        if reason:
            by_reason[reason].append(number)
    told = [f"{reason} ({name_rows(rows)})" for reason, rows in by_reason.items()]
    if all(reasons):
        raise DataError(f"{split}: there is nothing to learn from: {'; '.join(told)}.")
    for reason, rows in by_reason.items():
        get_logger().warning(
            "%s: %d of %d examples left out: %s (%s)",
            split, len(rows), len(reasons), reason, name_rows(rows),
        )  # fmt: skip


def tell_share(features: Any, split: str, encoder: ChatEncoder) -> None:
    """How much there is, and how much of it the loss looks at."""
    from rapidformer.tasks.rows import get_column

    tokens, trained = sum(get_column(features, "length")), sum(get_column(features, "trained"))
    cut = sum(get_column(features, "is_cut"))
    what = "prompts with answers" if encoder.columns.is_pair else "conversations"
    which = "everything" if encoder.trains_on_prompts else "the answers"
    if encoder.template is None:
        how = "no chat template"
    else:
        end = encoder.template.end_of_turn
        how = f"chat template, answers end with {end!r}" if end else "chat template"
    get_logger().info(
        "chat      %s: %s %s (%s), %s tokens, %.1f%% trained on: %s",
        split, f"{len(features):,}", what, how, f"{tokens:,}", 100 * trained / tokens, which,
    )  # fmt: skip
    if cut:
        get_logger().warning(
            "%s: %d of %d examples are longer than %d tokens and end there (--seq-length)",
            split, cut, len(features), encoder.length,
        )  # fmt: skip


def tell_packing(lengths: Sequence[int], rows: Sequence[Sequence[int]], split: str) -> None:
    """What packing has gained."""
    tokens = sum(lengths)
    filled = max(sum(lengths[number] for number in row) for row in rows)
    get_logger().info(
        "packing   %s: %s examples in %s rows, %.1f%% padding (%.1f%% unpacked, if all rows are "
        "padded to the longest)",
        split, f"{len(lengths):,}", f"{len(rows):,}",
        100 * (1 - tokens / (filled * len(rows))),
        100 * (1 - tokens / (max(lengths) * len(lengths))),
    )  # fmt: skip
