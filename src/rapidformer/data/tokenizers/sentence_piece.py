"""SentencePiece models: the model as it is (GPT's), or with special tokens after its pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rapidformer.data.tokenizers.base import Tokenizer, add_tokens, hash_parts
from rapidformer.errors import DataError, MissingPackageError

_APPENDED = {"cls": "<CLS>", "sep": "<SEP>", "eod": "<EOD>", "mask": "<MASK>"}


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, for BERT and T5 (``for_gpt=False``) or for GPT."""

    def __init__(self, model_file: Path, *, for_gpt: bool, vocab_extra_ids: int = 0) -> None:
        self._content = model_file.read_bytes()
        self._model = _load_model(self._content, model_file)
        get_piece = self._model.id_to_piece
        vocab = {get_piece(i): i for i in range(len(self._model))}
        special: dict[str, int | None] = {}
        for key in ("pad", "bos", "eos"):
            number = int(getattr(self._model, f"{key}_id")())
            special[key] = number if number >= 0 else None
        if for_gpt:
            special["eod"] = special["eos"]
        else:
            # They get their ids in this order.
            names = _APPENDED | {
                key: f"<{key.upper()}>" if piece_id is None else get_piece(piece_id)
                for key, piece_id in special.items()
            }
            add_tokens(vocab, names.values())
            special = {key: vocab[token] for key, token in names.items()}
        name = "GPTSentencePieceTokenizer" if for_gpt else "SentencePieceTokenizer"
        super().__init__(name, vocab, special, vocab_extra_ids)
        spelt = [] if for_gpt else [*names.values(), *self._sentinels]
        self._spelt = re.compile("|".join(f"({re.escape(token)})" for token in spelt))
        self._visible = {self.vocab[token] for token in spelt}

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        if not self._spelt.pattern or not any(self._spelt.search(text) for text in texts):
            return self._model.encode(texts, out_type=int, num_threads=1)
        return [self.tokenize(text) for text in texts]

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._spelt.finditer(text) if self._spelt.pattern else ():
            ids += self._model.encode(text[start : match.start()], out_type=int)
            ids.append(self.vocab[match.group()])
            start = match.end()
        ids += self._model.encode(text[start:], out_type=int)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        self._get_tokens(ids)
        words: list[str] = []
        run: list[int] = []
        for token_id in map(int, ids):
            if token_id in self._visible or token_id >= len(self._model):
                words += [self._model.decode(run), self.inv_vocab[token_id]]
                run = []
            else:
                run.append(token_id)
        return " ".join(word for word in [*words, self._model.decode(run)] if word)

    @property
    def fingerprint(self) -> str:
        return hash_parts([self.name, self._content, str(self.vocab_size)])

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_model"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._model = _load_model(self._content, Path("the model"))


def _load_model(content: bytes, file: Path) -> Any:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise MissingPackageError(
            "sentencepiece", "A SentencePiece tokenizer", extra="sentencepiece"
        ) from None
    try:
        return SentencePieceProcessor(model_proto=content)
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"{file} is not a SentencePiece model ({' '.join(str(error).split())[:120]}): "
            "--tokenizer-model names a file such as tokenizer.model."
        ) from None
