"""Every flag of the seeds parses as they spell it, and defaults are the contract's.

The tables are written out by hand from contract.md §2.2-2.4 and §2.7, not read from the code.
"""

from __future__ import annotations

import pytest

from rapidformer.config import Settings, get_settings, parse_arguments

# name -> default, contract §2.2 - 2.4 (documented settings) and §2.7 (inherited from Megatron).
CONTRACT_DEFAULTS = {
    # data, §2.2
    "micro_batch_size": None,
    "global_batch_size": None,
    "tokenizer_type": None,
    "split": "969, 30, 1",
    "data_impl": "infer",
    "data_path": None,
    "data_dir": None,
    "data_name": None,
    # model, §2.3
    "pretrained_model_name_or_path": None,
    "num_layers": None,
    "hidden_size": None,
    "num_attention_heads": None,
    "max_position_embeddings": None,
    "seq_length": None,
    # training, §2.4
    "task": None,
    "save": None,
    "lr": None,
    "lr_decay_style": "linear",
    "weight_decay": 0.01,
    "clip_grad": 1.0,
    "lr_warmup_fraction": None,
    "train_iters": None,
    "epochs": None,
    "log_interval": 10,
    # Megatron, §2.7
    "train_samples": None,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "sgd_momentum": 0.9,
    "optimizer": "adam",
    "seed": 1234,
    "lr_decay_iters": None,
    "lr_decay_samples": None,
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    "min_lr": 0.0,
    "save_interval": None,
    "load": None,
    "finetune": False,
    "fp16": False,
    "bf16": False,
    "loss_scale": None,
    "min_loss_scale": 1.0,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "eval_iters": 100,
    "exit_interval": None,
    "exit_duration_in_mins": None,
    "tensorboard_dir": None,
    "vocab_file": None,
    "merge_file": None,
    "decoder_seq_length": None,
    "mask_prob": 0.15,
    "short_seq_prob": 0.1,
    "mmap_warmup": False,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "checkpoint_activations": False,
    # the seeds' acceleration switches
    "mixed_precision": None,
    "onnx_runtime_training": False,
    "zero_1_memory_optimization": False,
    "zero_2_memory_optimization": False,
    "zero_3_memory_optimization": False,
    "fsdp_memory_optimization": False,
}

# contract §2.6, "Seed pages": words of a command line -> attribute -> value
SEED_FLAGS = [
    (["--user-script", "a.py"], "user_script", "a.py"),
    (["--task", "sequence_classification"], "task", "sequence_classification"),
    (
        ["--pretrained-model-name-or-path", "bert-base-cased"],
        "pretrained_model_name_or_path",
        "bert-base-cased",
    ),
    (["--data-path", "glue"], "data_path", "glue"),
    (["--data-path", "0.3", "a", "0.7", "b"], "data_path", ["0.3", "a", "0.7", "b"]),
    (["--data-name", "mrpc"], "data_name", "mrpc"),
    (["--data-dir", "glue"], "data_dir", "glue"),
    (["--dataset-name", "mrpc"], "data_name", "mrpc"),
    (["--epochs", "3"], "epochs", 3),
    (["--micro-batch-size", "16"], "micro_batch_size", 16),
    (["--global-batch-size", "64"], "global_batch_size", 64),
    (["--lr", "2e-5"], "lr", 2e-5),
    (["--lr-decay-style", "linear"], "lr_decay_style", "linear"),
    (["--lr-decay-style", "constant"], "lr_decay_style", "constant"),
    (["--lr-decay-style", "cosine"], "lr_decay_style", "cosine"),
    (["--lr-warmup-iters", "100"], "lr_warmup_iters", 100),
    (["--lr-warmup-fraction", ".01"], "lr_warmup_fraction", 0.01),
    (["--lr-decay-iters", "2000"], "lr_decay_iters", 2000),
    (["--min-lr", "0.0"], "min_lr", 0.0),
    (["--weight-decay", "1e-2"], "weight_decay", 0.01),
    (["--clip-grad", "1.0"], "clip_grad", 1.0),
    (["--seed", "42"], "seed", 42),
    (["--mixed-precision"], "mixed_precision", "auto"),
    (["--onnx-runtime-training"], "onnx_runtime_training", True),
    (["--zero-1-memory-optimization"], "zero_1_memory_optimization", True),
    (["--zero-2-memory-optimization"], "zero_2_memory_optimization", True),
    (["--zero-3-memory-optimization"], "zero_3_memory_optimization", True),
    (["--fsdp-memory-optimization"], "fsdp_memory_optimization", True),
    (["--num-layers", "12"], "num_layers", 12),
    (["--hidden-size", "768"], "hidden_size", 768),
    (["--num-attention-heads", "12"], "num_attention_heads", 12),
    (["--seq-length", "512"], "seq_length", 512),
    (["--tokenizer-type", "BertWordPieceLowerCase"], "tokenizer_type", "BertWordPieceLowerCase"),
    (["--tokenizer-type", "GPT2BPETokenizer"], "tokenizer_type", "GPT2BPETokenizer"),
    (["--max-position-embeddings", "512"], "max_position_embeddings", 512),
    (["--train-iters", "100"], "train_iters", 100),
    (["--vocab-file", "v.txt"], "vocab_file", "v.txt"),
    (["--merge-file", "m.txt"], "merge_file", "m.txt"),
    (["--data-impl", "mmap"], "data_impl", "mmap"),
    (["--split", "980,20"], "split", "980,20"),
    (["--tensor-model-parallel-size", "2"], "tensor_model_parallel_size", 2),
    (["--pipeline-model-parallel-size", "2"], "pipeline_model_parallel_size", 2),
    (["--log-interval", "1"], "log_interval", 1),
    (["--checkpoint-activations"], "checkpoint_activations", True),
    (["--save", "out"], "save", "out"),
    (["--save-interval", "10"], "save_interval", 10),
    (["--load", "out"], "load", "out"),
    (["--local_rank", "1"], "local_rank", 1),
    (["--local-rank=1"], "local_rank", 1),
    (["--fp16"], "fp16", True),
    (["--eval-interval", "1000"], "eval_interval", 1000),
    (["--eval-iters", "10"], "eval_iters", 10),
    (["--no-load-optim"], "no_load_optim", True),
    (["--no-load-rng"], "no_load_rng", True),
    (["--no-save-optim"], "no_save_optim", True),
    (["--keep-last"], "keep_last", True),
    (["--num-workers", "2"], "num_workers", 2),
    (["--recompute-granularity", "full"], "recompute_granularity", "full"),
]

BLACK_BOX = (
    "--task sequence_classification --pretrained-model-name-or-path bert-base-cased "
    "--data-path glue --data-name mrpc --epochs 3 --micro-batch-size 16 --global-batch-size 64 "
    "--lr 2e-5 --lr-decay-style linear --lr-warmup-iters 100 --weight-decay 1e-2 --clip-grad 1.0 "
    "--seed 42 --mixed-precision --onnx-runtime-training --zero-1-memory-optimization"
)
PRETRAINING = (
    "--task pretraining --pretrained-model-name-or-path bert-base-uncased --num-layers 12 "
    "--hidden-size 768 --num-attention-heads 12 --micro-batch-size 16 --global-batch-size 128 "
    "--seq-length 512 --tokenizer-type BertWordPieceLowerCase --max-position-embeddings 512 "
    "--train-iters 100 --data-path book_wiki_owtv2_small_text_sentence "
    "--vocab-file bert-en-uncased-vocab.txt --data-impl mmap --split 980,20 --lr 1e-3 "
    "--lr-decay-style linear --min-lr 0.0 --lr-decay-iters 2000 --weight-decay 1e-2 "
    "--clip-grad 1.0 --lr-warmup-fraction .01 --mixed-precision --onnx-runtime-training "
    "--fsdp-memory-optimization"
)
MEGATRON_GPT = (
    "--user-script trainer.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --micro-batch-size 16 "
    "--global-batch-size 128 --seq-length 512 --tokenizer-type GPT2BPETokenizer "
    "--max-position-embeddings 512 --train-iters 100 --data-path corpus --vocab-file v.json "
    "--merge-file m.txt --data-impl mmap --split 980,20 --lr 1e-3 --lr-decay-style linear "
    "--weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --log-interval 1 "
    "--zero-2-memory-optimization --checkpoint-activations --mixed-precision"
)


@pytest.mark.parametrize(("name", "default"), CONTRACT_DEFAULTS.items())
def test_default_is_the_contracts(name: str, default: object) -> None:
    args = parse_arguments([])
    assert getattr(args, name) == default
    assert type(getattr(args, name)) is type(default)
    assert get_settings()[name].default == default
    assert not args.is_given(name)


@pytest.mark.parametrize(("words", "name", "value"), SEED_FLAGS, ids=lambda part: str(part))
def test_seed_flag_parses_as_spelt(words: list[str], name: str, value: object) -> None:
    args = parse_arguments(words)
    assert getattr(args, name) == value
    assert type(getattr(args, name)) is type(value)


@pytest.mark.parametrize("command", [BLACK_BOX, PRETRAINING, MEGATRON_GPT])
def test_seed_command_parses_whole(command: str) -> None:
    words = command.split()
    args = parse_arguments(words)
    given = {name for name in get_settings() if args.is_given(name)}
    assert given == {
        word[2:].replace("-", "_").replace("dataset", "data")
        for word in words
        if word.startswith("--")
    }


def test_attributes_that_seed_scripts_read() -> None:
    args = parse_arguments(["--data-path", "glue", "--data-name", "mrpc"])
    assert (args.dataset_path, args.dataset_name) == ("glue", "mrpc")
    assert args.mask_prob == 0.15
    assert args.short_seq_prob == 0.1
    assert args.mmap_warmup is False
    assert args.reset_position_ids is False
    assert args.reset_attention_mask is False
    assert args.eod_mask_loss is False
    assert args.load is None
    assert args.no_load_optim is False
    assert args.zero_stage == 0


@pytest.mark.parametrize(
    ("flags", "stage"),
    [
        ([], 0),
        (["--zero-1-memory-optimization"], 1),
        (["--zero-2-memory-optimization"], 2),
        (["--zero-3-memory-optimization"], 3),
        (["--fsdp-memory-optimization"], 3),
    ],
)
def test_zero_stage(flags: list[str], stage: int) -> None:
    assert parse_arguments(flags).zero_stage == stage


def test_every_setting_has_help_and_a_field() -> None:
    fields = Settings.__dataclass_fields__
    for name, setting in get_settings().items():
        assert len(setting.help.split()) >= 2, f"{name} has no help text"
        assert name in fields
        assert not setting.help.endswith(".")
