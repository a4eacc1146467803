"""The functions that scripts and the command call, with Megatron's names and parameters.

Parameters come in Megatron's order; keywords after them are ours. ``train_valid_test_num_samples``
counts samples over the whole run, so data sets repeat their text as often as needed; 0 gives None
instead of a data set, and None uses the data exactly once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict, Unpack

from rapidformer.config import Settings
from rapidformer.data.pretraining.assemble import DECODER_LENGTH, Counts, Datasets, build_datasets
from rapidformer.data.pretraining.blend import Prefix
from rapidformer.errors import ConfigurationError


class DataOptions(TypedDict, total=False):
    """Data that is split already, instead of ``data_prefix``, and where index maps are kept."""

    train_data_prefix: Prefix | None
    valid_data_prefix: Prefix | None
    test_data_prefix: Prefix | None
    data_cache_path: str | Path | None


def build_pretraining_datasets(
    objective: str,
    args: Settings,
    train_valid_test_num_samples: Counts,
    *,
    tokenizer: Any = None,
    binary_head: bool = True,
    vocab_size: int | None = None,
) -> Datasets:
    """The data of a run's settings as gpt, bert or t5 samples; tokens are below ``vocab_size``."""
    if args.seq_length is None:
        raise ConfigurationError("pre-training data needs --seq-length, the tokens of a sample.")
    return build_datasets(
        objective, data_prefix=args.data_path, train_data_prefix=args.train_data_path,
        valid_data_prefix=args.valid_data_path, test_data_prefix=args.test_data_path,
        data_impl=args.data_impl, splits_string=args.split,
        train_valid_test_num_samples=train_valid_test_num_samples, seq_length=args.seq_length,
        seq_length_dec=args.decoder_seq_length or DECODER_LENGTH, masked_lm_prob=args.mask_prob,
        short_seq_prob=args.short_seq_prob, seed=args.seed, skip_warmup=not args.mmap_warmup,
        data_cache_path=args.data_cache_path, binary_head=binary_head, tokenizer=tokenizer,
        vocab_size=vocab_size,
    )  # fmt: skip


def build_train_valid_test_datasets(
    data_prefix: Prefix | None,
    data_impl: str,
    splits_string: str | None,
    train_valid_test_num_samples: Counts,
    seq_length: int,
    seed: int,
    skip_warmup: bool = True,
    **options: Unpack[DataOptions],
) -> Datasets:
    """GPT samples: ``text``, with ``seq_length + 1`` tokens."""
    return build_datasets(
        "gpt", data_prefix=data_prefix, data_impl=data_impl, splits_string=splits_string,
        train_valid_test_num_samples=train_valid_test_num_samples, seq_length=seq_length, seed=seed,
        skip_warmup=skip_warmup, **options,
    )  # fmt: skip


def build_train_valid_test_datasets_for_huggingface(
    data_prefix: Prefix | None,
    data_impl: str,
    splits_string: str | None,
    train_valid_test_num_samples: Counts,
    max_seq_length: int,
    masked_lm_prob: float,
    short_seq_prob: float,
    seed: int,
    skip_warmup: bool = True,
    binary_head: bool = True,
    *,
    tokenizer: Any = None,
    **options: Unpack[DataOptions],
) -> Datasets:
    """BERT samples for Hugging Face models.

    ``input_ids, attention_mask, token_type_ids, labels`` (-100 where nothing is masked) and, with
    ``binary_head``, ``next_sentence_label`` (1: the two segments are swapped).
    """
    return build_datasets(
        "bert", data_prefix=data_prefix, data_impl=data_impl, splits_string=splits_string,
        train_valid_test_num_samples=train_valid_test_num_samples, seq_length=max_seq_length,
        masked_lm_prob=masked_lm_prob, short_seq_prob=short_seq_prob, seed=seed,
        skip_warmup=skip_warmup, binary_head=binary_head, tokenizer=tokenizer, **options,
    )  # fmt: skip


build_pretrain_huggingface_bert_datasets = build_train_valid_test_datasets_for_huggingface
"""Older name of the same function."""
