"""Small corpora and tokenizers for the tests of pre-training samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rapidformer.data.indexed import IndexedWriter
from rapidformer.data.tokenizers import Tokenizer, build_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]"]
FIRST_WORD = len(SPECIAL)

Document = Sequence[Sequence[int]]


def make_tokenizer(
    folder: Path, *, words: int = 200, sentinels: int = 0, special: Sequence[str] = SPECIAL
) -> Tokenizer:
    """Every third token continues a word."""
    tokens = [f"##p{i}" if i % 3 == 2 else f"w{i}" for i in range(words)]
    path = folder / "vocab.txt"
    path.write_text("\n".join([*special, *tokens]) + "\n", encoding="utf-8")
    return build_tokenizer(
        tokenizer_type="BertWordPieceLowerCase", vocab_file=path, vocab_extra_ids=sentinels
    )


def make_documents(
    count: int, *, seed: int = 0, sentences: int = 8, length: int = 12, words: int = 200
) -> list[Document]:
    """Documents of up to so many sentences of up to so many tokens."""
    random = np.random.default_rng(seed)
    return [
        [
            random.integers(FIRST_WORD, FIRST_WORD + words, random.integers(1, length + 1)).tolist()
            for _ in range(random.integers(1, sentences + 1))
        ]
        for _ in range(count)
    ]


def write_corpus(prefix: Path, documents: Sequence[Document]) -> str:
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for document in documents:
            for sentence in document:
                writer.add_item(np.asarray(sentence, dtype=np.uint16))
            writer.end_document()
    return str(prefix)
