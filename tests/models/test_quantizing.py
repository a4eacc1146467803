"""QLoRA's settings, without the package that does the work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rapidformer.errors import ConfigurationError
from rapidformer.models.quantizing import get_quantization


def test_eight_bits_need_a_gpu() -> None:
    args = SimpleNamespace(quantize_base="8bit", device="cpu")
    with pytest.raises(ConfigurationError, match=r"8bit needs a GPU.*--quantize-base 4bit"):
        get_quantization(args)


def test_nothing_is_asked_for_without_the_flag() -> None:
    assert get_quantization(SimpleNamespace(quantize_base=None, device="auto")) == {}
