"""Small models and tokenizers made on the spot; nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rapidformer.config import Settings

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

MakeArgs = Callable[..., SimpleNamespace]


def make_args(**values: Any) -> SimpleNamespace:
    defaults = vars(Settings())
    unknown = set(values) - set(defaults)
    assert not unknown, unknown
    for name in ("data_path", "pretrained_model_name_or_path", "load"):
        if isinstance(values.get(name), Path):
            values[name] = str(values[name])
    return SimpleNamespace(**{**defaults, **values})


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


def compute_metrics(task: Any, records: list[Any], prepared: Any, split: str) -> dict[str, float]:
    """What an evaluation reports; nothing for a split without labels."""
    if not records or not prepared.is_labelled(split):
        return {}
    tally = task.build_tally(prepared, split)
    tally.update(records)
    return dict(tally.compute())


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
