"""Tokenizers behind one interface; `build_tokenizer` makes one from the flags."""

from rapidformer.data.tokenizers.base import Tokenizer
from rapidformer.data.tokenizers.build import TOKENIZER_TYPES, build_tokenizer

__all__ = ["TOKENIZER_TYPES", "Tokenizer", "build_tokenizer"]
