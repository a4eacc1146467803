"""A DeepSpeed file beside our settings: one value of each, or an error that names both places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rapidformer.config import Settings, arguments_from_mapping, parse_arguments, resolve
from rapidformer.config.deepspeed_file import build_deepspeed_config, get_file_schedule
from rapidformer.errors import ConfigurationError

# Every key of FlagAI's fifteen examples.
FLAGAI: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 100,
    "steps_per_print": 100,
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": False,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e7,
        "allgather_bucket_size": 5e7,
        "cpu_offload": True,
    },
    "zero_allow_untested_optimizer": True,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 3,
        "min_loss_scale": 2,
    },
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 1e-5, "weight_decay": 0.1, "betas": [0.9, 0.98], "eps": 1e-6},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-5, "warmup_num_steps": 2000},
    },
    "activation_checkpointing": {
        "partition_activations": True,
        "contiguous_memory_optimization": False,
    },
    "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 3},
    "wall_clock_breakdown": False,
}


def write(folder: Path, content: Any) -> str:
    path = folder / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def read(folder: Path, content: Any, *words: str, world_size: int = 2) -> Settings:
    path = write(folder, content)
    return resolve(parse_arguments(["--deepspeed", path, *words]), world_size=world_size)


def get_problems(folder: Path, content: Any, *words: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        read(folder, content, *words)
    return [problem.replace(str(folder) + "/", "") for problem in caught.value.problems]


def test_every_key_of_flagais_files_is_read(tmp_path: Path) -> None:
    args = read(tmp_path, FLAGAI)
    assert (args.micro_batch_size, args.gradient_accumulation_steps) == (2, 100)
    assert args.global_batch_size == 400
    assert (args.clip_grad, args.lr, args.weight_decay) == (0.5, 1e-5, 0.1)
    assert (args.adam_beta1, args.adam_beta2, args.adam_eps) == (0.9, 0.98, 1e-6)
    assert (args.optimizer, args.lr_warmup_iters) == ("adam", 2000)
    assert args.mixed_precision == "fp16"
    assert (args.loss_scale, args.loss_scale_window) == (None, 500)
    assert (args.hysteresis, args.min_loss_scale) == (3, 2)
    assert args.sources["clip_grad"].endswith("ds.json: gradient_clipping")


def test_what_deepspeed_is_handed_says_everything_once(tmp_path: Path) -> None:
    config = build_deepspeed_config(read(tmp_path, FLAGAI), "fp16")
    zero = config["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu"}
    assert "cpu_offload" not in zero
    assert config["fp16"] == {"enabled": True, "loss_scale": 1.0}
    assert not {"optimizer", "scheduler", "train_batch_size"} & set(config)


@pytest.mark.parametrize("content", [{}, FLAGAI])
def test_clipping_is_left_to_the_update(content: dict[str, Any], tmp_path: Path) -> None:
    """DeepSpeed would clip at 1.0 by itself, or a second time."""
    config = build_deepspeed_config(read(tmp_path, content), None)
    assert config["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("content", "words", "problem"),
    [
        ({"train_batch_size": 8}, "--global-batch-size 16",
         "--global-batch-size 16 and train_batch_size 8 in ds.json disagree"),
        ({"train_micro_batch_size_per_gpu": 8}, "--micro-batch-size 4",
         "--micro-batch-size 4 and train_micro_batch_size_per_gpu 8 in ds.json disagree"),
        ({"gradient_accumulation_steps": 8}, "--gradient-accumulation-steps 4",
         "--gradient-accumulation-steps 4 and gradient_accumulation_steps 8 in ds.json disagree"),
        ({"gradient_clipping": 0.5}, "--clip-grad 1.0",
         "--clip-grad 1.0 and gradient_clipping 0.5 in ds.json disagree"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "--lr 0.01",
         "--lr 0.01 and optimizer.params.lr 0.001 in ds.json disagree"),
        ({"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}}, "--weight-decay 0.2",
         "--weight-decay 0.2 and optimizer.params.weight_decay 0.1 in ds.json disagree"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}}, "--adam-beta2 0.999",
         "--adam-beta2 0.999 and optimizer.params.betas[1] 0.95 in ds.json disagree"),
        ({"optimizer": {"type": "AdamW", "params": {"eps": 1e-6}}}, "--adam-eps 1e-8",
         "--adam-eps 1e-08 and optimizer.params.eps 1e-06 in ds.json disagree"),
        ({"optimizer": {"type": "AdamW"}}, "--optimizer sgd",
         "--optimizer sgd and optimizer.type AdamW in ds.json disagree"),
        ({"optimizer": {"type": "Lion"}}, "--optimizer adam",
         "--optimizer adam and optimizer.type Lion in ds.json disagree"),
        ({"zero_optimization": {"stage": 2}}, "--zero-3-memory-optimization",
         "--zero-3-memory-optimization and zero_optimization.stage 2 in ds.json disagree"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}},
         "--cpu-offload", "--cpu-offload and zero_optimization.offload_optimizer.device none"),
        ({"bf16": {"enabled": True}}, "--fp16", "--fp16 and bf16.enabled true in ds.json disagree"),
        ({"fp16": {"enabled": False}}, "--mixed-precision fp16",
         "--mixed-precision fp16 and fp16.enabled false in ds.json disagree"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "--loss-scale 64",
         "--loss-scale 64.0 and fp16.loss_scale 128 in ds.json disagree"),
        ({"tensor_parallel": {"autotp_size": 2}}, "--tensor-model-parallel-size 1",
         "--tensor-model-parallel-size 1 and tensor_parallel.autotp_size 2 in ds.json disagree"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}}, "--lr 0.01",
         "--lr 0.01 and scheduler.params.warmup_max_lr 0.001 in ds.json disagree"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}},
         "--lr-warmup-iters 5",
         "--lr-warmup-iters 5 and scheduler.params.warmup_num_steps 10 in ds.json disagree"),
        ({"scheduler": {"type": "WarmupLR"}}, "--lr-decay-style cosine",
         "--lr-decay-style cosine and scheduler WarmupLR in ds.json both set"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, "",
         "--global-batch-size 10 is not a multiple of --micro-batch-size 4 x 2"),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
         "--global-batch-size 32",
         "--gradient-accumulation-steps 2 (ds.json: gradient_accumulation_steps) disagree: "
         "4 x 2 data-parallel ranks x 2 = 16"),
    ],
)  # fmt: skip
def test_what_is_said_in_two_places_must_agree(
    tmp_path: Path, content: Any, words: str, problem: str
) -> None:
    problems = get_problems(tmp_path, content, *words.split())
    assert any(problem in found for found in problems), problems


def test_all_disagreements_are_reported_at_once(tmp_path: Path) -> None:
    content = {"gradient_clipping": 2, "train_batch_size": 8, "zero_optimization": {"stage": 1}}
    words = "--clip-grad 1 --global-batch-size 4 --zero-2-memory-optimization"
    assert len(get_problems(tmp_path, content, *words.split())) == 3


def test_the_same_value_in_two_places_is_fine(tmp_path: Path) -> None:
    content = {
        "train_batch_size": 16,
        "gradient_clipping": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    words = "--global-batch-size 16 --clip-grad 1.0 --fsdp-memory-optimization --mixed-precision"
    args = read(tmp_path, content, *words.split(), "--lr", "0.001", "--optimizer", "adam")
    assert (args.lr, args.mixed_precision) == (1e-3, "bf16")


def test_auto_is_filled_from_the_settings(tmp_path: Path) -> None:
    content = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale_window": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": "auto",
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
            },
        },
    }
    words = "--micro-batch-size 2 --global-batch-size 8 --lr 0.1 --bf16 --lr-warmup-fraction 0.1"
    args = read(tmp_path, content, *words.split(), "--clip-grad", "0.3")
    config = build_deepspeed_config(args, "bf16")
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 2
    assert args.clip_grad == 0.3
    assert config["bf16"] == {"enabled": True} and "fp16" not in config
    assert "reduce_bucket_size" not in config["zero_optimization"]
    assert args.weight_decay == 0.01
    assert get_file_schedule(args, train_iters=50) == (
        "WarmupDecayLR",
        {
            "total_num_steps": 50,
            "warmup_min_lr": 0.0,
            "warmup_max_lr": 0.1,
            "warmup_num_steps": 5,
        },
    )
    assert "auto" not in json.dumps(config)


def test_a_schedule_of_unknown_length_asks_for_it(tmp_path: Path) -> None:
    content = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    with pytest.raises(ConfigurationError, match="give --train-iters or --epochs"):
        get_file_schedule(read(tmp_path, content), train_iters=None)


def test_an_optimizer_section_means_what_it_means_to_deepspeed(tmp_path: Path) -> None:
    """No weight decay and no momentum where the file names none: not our defaults."""
    adam = read(tmp_path, {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}})
    assert adam.weight_decay == 0.0
    sgd = read(tmp_path, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    assert (sgd.optimizer, sgd.sgd_momentum) == ("sgd", 0.0)


def test_an_optimizer_that_is_not_ours_is_left_to_deepspeed(tmp_path: Path) -> None:
    content = {"optimizer": {"type": "Lion", "params": {"lr": "auto", "betas": [0.9, 0.99]}}}
    config = build_deepspeed_config(read(tmp_path, content, "--lr", "0.1"), None)
    assert config["optimizer"]["params"] == {"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.0}
    assert "zero_allow_untested_optimizer" not in config


def test_our_flags_fill_what_the_file_leaves_open(tmp_path: Path) -> None:
    words = "--zero-3-memory-optimization --cpu-offload --tensor-model-parallel-size 1"
    zero = build_deepspeed_config(read(tmp_path, {}, *words.split()), None)["zero_optimization"]
    assert zero == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }


def test_16_bit_weights_and_split_layers_have_zero(tmp_path: Path) -> None:
    """Stage 1 replaces none: the same numbers, and one kind of optimizer."""
    half = build_deepspeed_config(read(tmp_path, {"bf16": {"enabled": True}}), "bf16")
    assert half["zero_optimization"]["stage"] == 1
    split = read(tmp_path, {"tensor_parallel": {"autotp_size": 2}}, world_size=4)
    assert (split.tensor_model_parallel_size, split.data_parallel_size) == (2, 2)
    assert build_deepspeed_config(split, None)["zero_optimization"]["stage"] == 1


def test_mixed_precision_by_the_flag_alone_stays_autocast(tmp_path: Path) -> None:
    config = build_deepspeed_config(read(tmp_path, {}, "--mixed-precision", "bf16"), "bf16")
    assert "bf16" not in config and config["zero_optimization"]["stage"] == 0


@pytest.mark.parametrize("content", ['{"a": 1', "[1]", '{"bf16": {}, "bf16": {}}', "\udcff"])
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigurationError, match=r"--deepspeed .*ds\.json"):
        resolve(parse_arguments(["--deepspeed", str(path)]))


def test_a_missing_file_says_so() -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        resolve(arguments_from_mapping({"deepspeed_config": "nowhere.json"}))


@pytest.mark.parametrize(
    ("content", "words", "nearest"),
    [
        ({}, "--pipeline-model-parallel-size 2", "with --zero-1-memory-optimization"),
        ({}, "--context-parallel-size 2", "--zero-3-memory-optimization"),
        ({}, "--hybrid-sharding-size 2", "zero_hpz_partition_size"),
        ({"zero_optimization": {"stage": 1}}, "--optimizer muon --lr 1", "use adam or sgd"),
        ({"zero_optimization": {"stage": 3}}, "--tensor-model-parallel-size 2", "stage 1 or 2"),
        ({"zero_optimization": {"stage": 3}}, "--compile", "Use stage 2"),
        ({"zero_optimization": {"stage": 4}}, "", "must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "", "use cpu"),
        ({}, "--cpu-offload", "needs a ZeRO stage"),
        ({"optimizer": {"type": "OneBitAdam"}}, "", "use AdamW"),
        ({"elasticity": {"enabled": True}}, "", "--max-restarts"),
        ({"amp": {"enabled": True}}, "", "--mixed-precision"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "", "keep only one"),
        ({"gradient_clipping": "much"}, "", "must be a number, got 'much'"),
        ({"gradient_allreduce_op": "sum"}, "", "must be mean"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_nearest(
    tmp_path: Path, content: Any, words: str, nearest: str
) -> None:
    problems = get_problems(tmp_path, content, *words.split())
    assert any(nearest in problem for problem in problems), problems


def test_the_launchers_bare_flag_may_accompany_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"gradient_clipping": 0.25})
    for words in (
        ["--deepspeed", "--deepspeed_config", path],
        ["--deepspeed_config", path, "--deepspeed"],
        ["--deepspeed", f"--deepspeed-config={path}"],
        ["--deepspeed", path],
    ):
        assert resolve(parse_arguments(words)).clip_grad == 0.25
    with pytest.raises(ConfigurationError, match="deepspeed"):
        parse_arguments(["--deepspeed", "--lr", "1"])


def test_what_must_be_a_number_is_named_by_its_key(tmp_path: Path) -> None:
    content = {"zero_optimization": {"stage": "two"}, "fp16": {"enabled": True, "loss_scale": []}}
    with pytest.raises(ConfigurationError) as caught:
        resolve(parse_arguments(["--deepspeed", write(tmp_path, content)]))
    assert "zero_optimization.stage must be a number, got 'two'." in str(caught.value)
    assert "fp16.loss_scale must be a number, got []." in str(caught.value)
