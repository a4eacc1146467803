"""Small models and tokenizers made on the spot; nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_TEXT = """
the a an is was in of and to not good bad fine great awful movie film book cat dog sat on mat who
what where when lives john mary paris london berlin red green blue one two three hello world yes no
summary text long short answer question runs eats sleeps happy sad . , ? !
"""
WORDS = _TEXT.split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [
    "##s",
    "##ing",
    "##er",
    *"abcdefghijklmnopqrstuvwxyz",
    *[f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"],
]
VOCABULARY = list(dict.fromkeys([*SPECIAL, *WORDS, *PIECES]))

DEFAULTS: dict[str, Any] = {
    "task": None, "pretrained_model_name_or_path": None, "load": None, "data_path": None,
    "data_name": None, "data_dir": None, "train_data": None, "valid_data": None, "test_data": None,
    "seq_length": None, "decoder_seq_length": None, "doc_stride": None, "max_answer_length": 30,
    "n_best": 20, "mask_prob": 0.15, "seed": 1234, "text_column": None, "text_pair_column": None,
    "label_column": None, "question_column": None, "context_column": None, "answers_column": None,
    "choice_columns": None, "image_column": None, "target_column": None, "source_prefix": None,
    "num_labels": None, "problem_type": None, "label_all_tokens": False, "group_texts": True,
    "max_train_samples": None, "max_eval_samples": None, "max_predict_samples": None,
    "trust_remote_code": False, "cache_dir": None, "num_beams": 1, "max_new_tokens": None,
    "preprocessing_workers": None, "num_layers": None, "hidden_size": None,
    "num_attention_heads": None, "ffn_hidden_size": None, "max_position_embeddings": None,
    "vocab_size": None, "model_type": None, "from_scratch": False, "hidden_dropout": None,
    "allow_partial_load": False,
    "attention_dropout": None, "init_method_std": None, "tokenizer_type": None, "vocab_file": None,
    "merge_file": None, "image_size": None, "patch_size": None, "world_size": 1,
    "validation_split": None, "lora_rank": None, "peft_config": None, "quantize_base": None,
}  # fmt: skip

MakeArgs = Callable[..., SimpleNamespace]


def make_args(**values: Any) -> SimpleNamespace:
    unknown = set(values) - set(DEFAULTS)
    assert not unknown, unknown
    for name in ("data_path", "pretrained_model_name_or_path", "load"):
        if isinstance(values.get(name), Path):
            values[name] = str(values[name])
    return SimpleNamespace(**{**DEFAULTS, **values})


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def build_tokenizer(folder: Path) -> Any:
    from transformers import BertTokenizer

    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    return BertTokenizer(vocab=str(vocabulary), do_lower_case=True, model_max_length=64)


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import BertConfig, BertForMaskedLM

    folder = tmp_path_factory.mktemp("bert")
    tokenizer = build_tokenizer(folder)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gpt_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("gpt")
    words = ["<|endoftext|>", "<unk>", *WORDS]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|endoftext|>",
        unk_token="<unk>", model_max_length=64,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=64,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def t5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    folder = tmp_path_factory.mktemp("t5")
    words = ["<pad>", "</s>", "<unk>", *WORDS]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import ViTConfig, ViTForImageClassification
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    folder = tmp_path_factory.mktemp("vit")
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder)
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(folder)
    return folder


def run_split(task: Any, model: Any, prepared: Any, split: str, batch_size: int = 3) -> list[Any]:
    """What the evaluation loop does, on one process."""
    import torch

    model.eval()
    rows = prepared.get_split(split)
    records: list[Any] = []
    with torch.no_grad():
        for start in range(0, len(rows), batch_size):
            part = [rows[i] for i in range(start, min(start + batch_size, len(rows)))]
            batch = prepared.collate(part)
            found = task.evaluate_step(model, batch, prepared)
            assert len(found) == len(part)
            records += found
    return records


def train_steps(task: Any, model: Any, prepared: Any, steps: int = 3) -> list[float]:
    """A few steps on the whole training split; returns the losses."""
    import torch

    torch.manual_seed(0)  # the losses of so few steps depend on what dropout draws
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rows = prepared.train
    losses = []
    for _ in range(steps):
        batch = prepared.collate([rows[i] for i in range(len(rows))])
        loss = task.forward(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
