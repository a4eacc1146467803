"""TRL's scripts with only the import line changed: the same numbers, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from rapidformer.dialects import trl as ours
from rapidformer.errors import ConfigurationError

WORDS = [f"w{n}" for n in range(20)]
MODEL = torch.nn.Linear(1, 1)
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 4,
    "logging_steps": 1, "learning_rate": 0.5, "optim": "sgd", "lr_scheduler_type": "constant",
    "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no",
    "train_sampling_strategy": "sequential", "gradient_checkpointing": False,
}  # fmt: skip


def build_tokenizer() -> Any:
    vocabulary = {word: n for n, word in enumerate(["<end>", "<pad>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", unk_token="<unk>"
    )


def build_model(folder: Path) -> Any:
    """As users load it: TRL makes its reference from the folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, initializer_range=0.3, eos_token_id=0, pad_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


def make_pairs(count: int) -> Dataset:
    dice = torch.Generator().manual_seed(count)

    def draw(most: int) -> str:
        size = int(torch.randint(1, most, (), generator=dice))
        return " " + " ".join(WORDS[n] for n in torch.randint(0, 20, (size,), generator=dice))

    rows = [
        {"prompt": draw(5).strip(), "chosen": draw(6), "rejected": draw(6)} for _ in range(count)
    ]
    return Dataset.from_list(rows)


def run_dpo(library: Any, folder: Path) -> list[dict[str, Any]]:
    """A script as TRL's users write it."""
    trainer = library.DPOTrainer(
        model=build_model(folder / "model"),
        args=library.DPOConfig(str(folder), beta=0.2, max_length=16, **COMMON),
        train_dataset=make_pairs(8), eval_dataset=make_pairs(4), processing_class=build_tokenizer(),
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    history: list[dict[str, Any]] = trainer.state.log_history
    return history


def test_dpo_gives_the_numbers_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")

    found, wanted = run_dpo(ours, tmp_path / "ours"), run_dpo(trl, tmp_path / "trl")
    names = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
             "logps/chosen", "logps/rejected")  # fmt: skip
    of_tokens = ("logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy")
    steps = [[line for line in lines if "loss" in line] for lines in (found, wanted)]
    assert len(steps[0]) == len(steps[1]) == 4 and steps[0][0]["loss"] == pytest.approx(0.6931472)
    for mine, theirs in zip(*steps, strict=True):
        for name in ("loss", "grad_norm", "learning_rate", *names, *of_tokens):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-6, rel=2e-6), name
    last, last_theirs = (next(line for line in reversed(s) if "eval_loss" in line)
                         for s in (found, wanted))  # fmt: skip
    assert last.keys() >= {f"eval_{name}" for name in of_tokens}  # TRL's are means of means
    for name in ("loss", *names):
        assert last[f"eval_{name}"] == pytest.approx(last_theirs[f"eval_{name}"], abs=2e-6), name


def test_grpo_script(tmp_path: Path) -> None:
    """TRL counts answers: 2 devices' worth of 4 answers are 2 prompts."""

    def last_word(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        assert len(columns["completion_ids"]) == len(prompts) == len(columns["wanted"])
        return [
            float(word in text) for text, word in zip(completions, columns["wanted"], strict=True)
        ]

    rows = [{"prompt": f"w{n} w{n + 1}", "wanted": f"w{n}"} for n in range(8)]
    settings = {**COMMON, "per_device_train_batch_size": 8, "max_steps": 2}
    trainer = ours.GRPOTrainer(
        build_model(tmp_path / "model"), last_word,
        args=ours.GRPOConfig(
            str(tmp_path), num_generations=4, max_completion_length=3, beta=0.1, **settings
        ),
        train_dataset=Dataset.from_list(rows), processing_class=build_tokenizer(),
    )  # fmt: skip
    trainer.train()
    lines = [line for line in trainer.state.log_history if "reward" in line]
    assert [line["step"] for line in lines] == [1, 2] and lines[0]["kl"] == pytest.approx(0)
    assert "rewards/last_word/mean" in lines[0] and trainer.engine.args.global_batch_size == 2


@pytest.mark.parametrize(
    ("name", "options", "shown"),
    [
        ("KTO", {}, "kl"),
        ("Reward", {}, "accuracy"),
        ("ORPO", {}, "log_odds_ratio"),
        ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}, "rewards/margins"),
    ],
)
def test_other_trainers(name: str, options: dict[str, Any], shown: str, tmp_path: Path) -> None:
    """By names alone, with the model's folder instead of a model; also conversations, and
    evaluation sets with names."""
    build_model(tmp_path / "model")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[:1] }} {{ m.content }} <end>{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"]}],
            "rejected": [{"role": "assistant", "content": row["rejected"]}],
        }
        for row in make_pairs(4)
    ]
    config = getattr(ours, f"{name}Config")(str(tmp_path / "run"), max_length=16, **{
        **COMMON, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, **options,
    })  # fmt: skip
    trainer = getattr(ours, f"{name}Trainer")(
        str(tmp_path / "model"), args=config, train_dataset=Dataset.from_list(rows),
        eval_dataset={"few": Dataset.from_list(rows[:2])},
    )  # fmt: skip
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2]
    assert shown in lines[0] and lines[0]["loss"] != lines[1]["loss"]
    assert any(f"eval_few_{shown}" in line for line in trainer.state.log_history)
    assert f"test_{shown}" in trainer.predict(Dataset.from_list(rows)).metrics


def test_dropout_is_off_in_adapters_too(tmp_path: Path) -> None:
    from peft import LoraConfig

    trainer = ours.DPOTrainer(
        build_model(tmp_path / "model"), args=ours.DPOConfig(str(tmp_path), **COMMON),
        train_dataset=make_pairs(2), processing_class=build_tokenizer(),
        peft_config=LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj"]),
    )  # fmt: skip
    rates = {m.p for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == {0.0}


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: ours.DPOConfig("x", ld_alpha=0.5), r"DPOConfig\(ld_alpha=0.5\) is not supported"),
        (
            lambda: ours.DPOConfig("x", loss_type=["ipo", "hinge"]).list_settings(),
            "use one of sigm",
        ),
        (
            lambda: ours.DPOConfig("x", loss_type="ipo", loss_weights=[1.0, 0.5]).list_settings(),
            "use one of sigm",
        ),
        (
            lambda: ours.DPOConfig("x", model_init_kwargs="attn=eager"),
            "model_init_kwargs='attn=eager' is not a JSON object",
        ),
        (lambda: ours.CPOConfig("x").list_settings(), "use loss_type='simpo'"),
        (lambda: ours.GRPOConfig("x", vllm_mode="server"), r"GRPOConfig\(vllm_mode=...\) is not"),
        (lambda: ours.GRPOConfig("x", use_vllm=True), "there is no inference server"),
        (
            lambda: ours.DPOTrainer("x", args=ours.KTOConfig("x")),
            "takes a DPOConfig, got",
        ),
        (lambda: ours.DPOTrainer(args=ours.DPOConfig("x")), "DPOTrainer needs a model"),
        (lambda: ours.DPOTrainer(MODEL, MODEL), "ref_model must not be the model that learns"),
        (
            lambda: ours.DPOTrainer(MODEL, processing_class=build_tokenizer()),
            "DPOTrainer needs a train_dataset",
        ),
        (lambda: ours.GRPOTrainer("x", [max, max]), "two reward functions are called max"),
    ],
)
def test_what_is_not_supported_says_so(build: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        build()


def test_what_would_not_be_called_is_refused(tmp_path: Path) -> None:
    class Own(ours.DPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
            return 0.0

    model, tokenizer = build_model(tmp_path), build_tokenizer()
    with pytest.raises(ConfigurationError, match=r"Own\.compute_loss would not be called"):
        Own(model, train_dataset=make_pairs(2), processing_class=tokenizer)
    with pytest.raises(ConfigurationError, match=r"DPOTrainer\(compute_metrics=...\) is not supp"):
        ours.DPOTrainer(
            model, train_dataset=make_pairs(2), processing_class=tokenizer, compute_metrics=len
        )


def test_how_to_quantize_goes_to_a_model_given_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_model(tmp_path)
    given: list[Any] = []
    load = LlamaForCausalLM.from_pretrained

    def from_pretrained(name: str, quantization_config: Any = None, **options: Any) -> Any:
        given.append(quantization_config)
        return load(name, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    common: dict[str, Any] = {
        "args": ours.DPOConfig(str(tmp_path / "run"), **COMMON),
        "train_dataset": make_pairs(2),
        "processing_class": build_tokenizer(),
    }
    for config in (None, "in 4 bits"):
        ours.DPOTrainer(str(tmp_path), quantization_config=config, **common)
    assert given == [None, "in 4 bits"]
    with pytest.raises(ConfigurationError, match="is for a model given by its name: load yours"):
        ours.DPOTrainer(build_model(tmp_path), quantization_config="in 4 bits", **common)


def test_a_reference_may_be_a_name(tmp_path: Path) -> None:
    model = build_model(tmp_path)
    trainer = ours.DPOTrainer(
        model, str(tmp_path), ours.DPOConfig(str(tmp_path / "run"), **COMMON), None, make_pairs(2),
        processing_class=build_tokenizer(),
    )  # fmt: skip
    assert isinstance(trainer.provide_frozen_models()["reference"], LlamaForCausalLM)


@pytest.mark.parametrize("name", [name for name in ours.__all__ if name.endswith("Config")])
def test_a_command_line_gives_the_same_defaults(name: str) -> None:
    build = getattr(ours, name)
    (parsed,) = HfArgumentParser(build).parse_args_into_dataclasses(["--output_dir", "x"])
    assert parsed.to_dict() == build("x").to_dict()


def test_names_become_settings() -> None:
    assert ours.GRPOConfig("x", scale_rewards=False).list_settings()["scale_rewards"] == "none"
    kto = ours.KTOConfig("x", beta=0.3, desirable_weight=2.0).list_settings()
    assert (kto["loss"], kto["beta"], kto["desirable_weight"]) == ("kto", 0.3, 2.0)
    both = ours.DPOConfig("x", loss_type=["sigmoid_norm", "sft"], loss_weights=[1.0, 0.5])
    wanted = {"loss": "sigmoid", "length_normalized": True, "sft_weight": 0.5, "seq_length": 1024}
    assert both.list_settings().items() >= wanted.items()
    smooth = {"label_smoothing": 0.2}  # TRL's sigmoid has none
    assert "label_smoothing" not in ours.DPOConfig("x", **smooth).list_settings()
    robust = ours.DPOConfig("x", loss_type="robust", **smooth).list_settings()
    assert robust["label_smoothing"] == 0.2
    simpo = ours.CPOConfig("x", loss_type="simpo", cpo_alpha=0.0, simpo_gamma=1.2).list_settings()
    assert simpo.items() >= {"loss": "simpo", "sft_weight": 0.0, "simpo_gamma": 1.2}.items()
