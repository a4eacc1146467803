"""The null tokenizer: a text already is ids, written as integers separated by spaces."""

from __future__ import annotations

from collections.abc import Sequence

from rapidformer.data.tokenizers.base import Tokenizer
from rapidformer.errors import DataError


class NumberTokenizer(Tokenizer):
    """Ids 0 to ``vocab_size - 1`` stand for themselves; the next one ends a document."""

    def __init__(self, vocab_size: int, *, vocab_extra_ids: int = 0) -> None:
        vocab = {str(number): number for number in range(vocab_size)}
        vocab["<eod>"] = vocab_size
        self._numbers = vocab_size
        super().__init__("NullTokenizer", vocab, {"eod": vocab_size}, vocab_extra_ids)

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise DataError(
                f"NullTokenizer needs integers separated by spaces, not {text[:40]!r}."
            ) from None
        if ids and not 0 <= min(ids) <= max(ids) < self._numbers:
            wrong = next(number for number in ids if not 0 <= number < self._numbers)
            raise DataError(
                f"The id {wrong} is out of range: --vocab-size {self._numbers} allows 0 to "
                f"{self._numbers - 1}."
            )
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(self._get_tokens(ids))
