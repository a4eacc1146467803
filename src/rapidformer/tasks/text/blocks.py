"""Turn plain text into rows of tokens for language models.

With `group_texts`, texts are joined and cut into rows of exactly the sequence length, so that
nothing is padded or truncated; what remains at the end of a batch of 1000 texts becomes a shorter
row instead of being dropped. Without it, each text is one row, truncated to the length.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from rapidformer.config import Settings
from rapidformer.errors import DataError
from rapidformer.tasks.base import check_row_texts


def encode_blocks(
    rows: Any,
    split: str,
    column: str,
    tokenizer: Any,
    max_length: int,
    args: Settings,
    *,
    add_special: bool,
) -> Any:
    """Token rows. ``add_special`` frames each row as the tokenizer does ([CLS] ... [SEP]);
    otherwise the end-of-text token, if there is one, follows each text.
    """
    from rapidformer.tasks.rows.rows import map_rows
    from rapidformer.tasks.text.text import get_tokenizer_key

    before, after = get_frame(tokenizer) if add_special else ([], [])
    room = max_length - len(before) - len(after)
    end = [] if add_special or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        texts = [
            t for t in check_row_texts(columns[column], column, split, indices[0]) if t.strip()
        ]
        ids = _tokenize(texts, tokenizer) if texts else []
        if args.group_texts:
            joined = list(chain.from_iterable([*text, *end] for text in ids))
            pieces = [joined[start : start + room] for start in range(0, len(joined), room)]
        else:
            pieces = [[*text, *end][:room] for text in ids]
        framed = [[*before, *piece, *after] for piece in pieces if len(piece) > 1 or add_special]
        return {"input_ids": framed, "attention_mask": [[1] * len(row) for row in framed]}

    key = ("blocks", column, max_length, args.group_texts, add_special)
    result = map_rows(
        rows,
        encode,
        workers=args.preprocessing_workers,
        key=(*key, get_tokenizer_key(tokenizer)),
    )
    if len(result) == 0:
        raise DataError(f"{split}: the column {column} has no text to train on.")
    return result


def _tokenize(texts: list[str], tokenizer: Any) -> list[list[int]]:
    # No length, or the tokenizer would warn about texts that are cut later anyway.
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [list(ids) for ids in encoded]


def get_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after a text."""
    probe = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a")["input_ids"]
    for start in range(len(framed) - len(probe) + 1):
        if framed[start : start + len(probe)] == probe:
            return framed[:start], framed[start + len(probe) :]
    return [], []
