"""The models and data that the benchmarks have in common; generated, never downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

Rows = list[dict[str, Any]]
LORA_TARGETS = "all-linear"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its data; ``make_rows(count)`` gives the rows."""

    build: Callable[[], nn.Module]
    make_rows: Callable[[int], Rows]
    batch: int
    lora_rank: int | None = None
    unit: str = "tokens"
    goal: str = ""
    repeats: int = 1
    """How many times as many steps to run: short steps need more to be timed."""


def make_bert_config(size: str) -> BertConfig:
    """``base`` is BERT-base; ``medium`` and ``small`` are for CPUs."""
    if size == "base":
        return BertConfig(num_labels=2)
    if size == "medium":
        return BertConfig(
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
            num_labels=2,
        )
    return BertConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        num_labels=2,
    )


def make_pair_rows(count: int, *, shortest: int = 20, longest: int = 99) -> Rows:
    """Rows like those of a sentence-pair task: uniformly distributed lengths, two labels.

    A label has its own half of the vocabulary, so that the loss can fall.
    """
    random = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        length = int(random.integers(shortest, longest + 1))
        label = int(random.integers(0, 2))
        ids = (random.integers(1000, 15500, length) + 14500 * label).tolist()
        rows.append({"input_ids": ids, "labels": label})
    return rows


def make_text_rows(count: int, *, length: int, vocabulary: int) -> Rows:
    """Rows of one length for a causal model: a Markov chain, so that the loss can fall."""
    random = np.random.default_rng(0)
    step = random.integers(1, vocabulary, 64)
    rows = []
    for _ in range(count):
        choices = random.integers(0, len(step), length)
        ids = (np.cumsum(step[choices % 7]) % vocabulary).tolist()
        rows.append({"input_ids": ids, "labels": ids})
    return rows


def make_translation_rows(count: int, *, length: int, vocabulary: int) -> Rows:
    """Source and target of one length."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        source = random.integers(3, vocabulary, length).tolist()
        rows.append({"input_ids": source, "labels": source[::-1]})
    return rows


def _build_llama(size: str) -> nn.Module:
    sizes: dict[str, Any] = {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256,
    }  # fmt: skip
    if size == "tiny":
        sizes |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512}
    config = LlamaConfig(**sizes, max_position_embeddings=4096, tie_word_embeddings=True)
    return LlamaForCausalLM(config)


def _build_gpt2(size: str) -> nn.Module:
    if size == "tiny":
        return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=512))
    return GPT2LMHeadModel(GPT2Config(vocab_size=50304))


def _build_t5(size: str) -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 1024, "d_ff": 16384, "num_layers": 24, "num_heads": 32}
    sizes |= {"d_kv": 128, "vocab_size": 32128}
    if size == "tiny":
        sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16}
        sizes |= {"vocab_size": 512}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def build_word_tokenizer(words: int, *, has_frame: bool, length: int) -> PreTrainedTokenizerFast:
    """Of the words w0, w1, ...; padding is 0 and the end 3. A frame is a token before and after."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    names = [*special, *(f"w{number}" for number in range(words))]
    backend = Tokenizer(
        models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if has_frame:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", eos_token="[SEP]", model_max_length=length,
    )  # fmt: skip


def add_lora(model: nn.Module, rank: int | None) -> nn.Module:
    if rank is None:
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=LORA_TARGETS)
    return get_peft_model(model, config)  # type: ignore[arg-type]


def list_workloads(size: str) -> dict[str, Workload]:
    """``full`` for a GPU; ``tiny`` has the same shapes in miniature, to try the scripts.

    ``medium`` is ``tiny`` with a BERT that keeps two CPU cores busy.
    """
    bert = {"full": "base", "medium": "medium", "tiny": "small"}[size]
    size = "full" if size == "full" else "tiny"
    is_tiny = size == "tiny"
    short, long = (32, 64) if is_tiny else (1024, 4096)
    words, many_words = (512, 512) if is_tiny else (50304, 128256)

    def build_bert() -> nn.Module:
        return BertForSequenceClassification(make_bert_config(bert))

    def make_long(count: int) -> Rows:
        return make_text_rows(count, length=long, vocabulary=many_words)

    llama = Workload(build=lambda: _build_llama(size), make_rows=make_long, batch=4)
    return {
        "bert-16": Workload(
            build=build_bert,
            make_rows=make_pair_rows,
            batch=16,
            goal="10 x HF",
            repeats=1 if is_tiny else 8,
        ),
        "bert-64": Workload(
            build=build_bert,
            make_rows=make_pair_rows,
            batch=64,
            goal="6 x HF",
            repeats=1 if is_tiny else 8,
        ),
        "gpt2": Workload(
            build=lambda: _build_gpt2(size),
            make_rows=lambda n: make_text_rows(n, length=short, vocabulary=words),
            batch=4 if is_tiny else 32,
            goal="520k tokens/s",
        ),
        "llama1b": Workload(
            build=llama.build, make_rows=make_long, batch=4, goal="66k tokens/s, 32 GiB"
        ),
        "lora": Workload(
            build=llama.build,
            make_rows=make_long,
            batch=4,
            lora_rank=16,
            goal="1.6 x HF, half its memory",
        ),
        "t5-3b": Workload(
            build=lambda: _build_t5(size),
            make_rows=lambda n: make_translation_rows(n, length=short // 2, vocabulary=512),
            batch=8,
            unit="samples",
            goal="2 x HF, 60 GiB",
        ),
    }
