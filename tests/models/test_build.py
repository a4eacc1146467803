from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.models.build import build_pretrained, load_image_processor, load_tokenizer

from .conftest import SMALL, make_args


def test_local_folder_in_fp32_with_a_fresh_head(folder: Path, caplog: Any) -> None:
    args = make_args(pretrained_model_name_or_path=str(folder), num_layers=2)
    with caplog.at_level(logging.INFO, logger="rapidformer"):
        logging.getLogger("rapidformer").propagate = True
        model = build_pretrained("AutoModelForSequenceClassification", args, num_labels=5)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.num_labels == 5 and model.classifier.out_features == 5
    assert "classifier.weight (saved (3, 16), needed (5, 16))" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "auto_class"),
    [
        ("bert", "AutoModelForSequenceClassification"),
        ("roberta", "AutoModelForMaskedLM"),
        ("distilbert", "AutoModelForTokenClassification"),
        ("gpt2", "AutoModelForCausalLM"),
        ("llama", "AutoModelForCausalLM"),
        ("t5", "AutoModelForSeq2SeqLM"),
        ("bart", "AutoModelForSeq2SeqLM"),
        ("deberta-v2", "AutoModelForSequenceClassification"),
    ],
)
def test_from_scratch(model_type: str, auto_class: str) -> None:
    args = make_args(model_type=model_type, max_position_embeddings=32, **SMALL)
    model = build_pretrained(auto_class, args)
    assert model.get_input_embeddings().weight.shape == (50, 16)
    assert sum(p.numel() for p in model.parameters()) < 40_000
    config = model.config
    assert config.num_hidden_layers == 2 and config.num_attention_heads == 2
    ids = torch.arange(4)[None] + 5
    inputs = {"input_ids": ids}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    assert model(**inputs).logits is not None


def test_from_scratch_with_the_sizes_of_a_folder(folder: Path) -> None:
    args = make_args(
        pretrained_model_name_or_path=str(folder), from_scratch=True, num_layers=3, seq_length=64,
        hidden_dropout=0.3,
    )  # fmt: skip
    torch.manual_seed(1)
    model = build_pretrained("AutoModelForMaskedLM", args)
    assert model.config.num_hidden_layers == 3 and model.config.hidden_size == 16
    assert model.config.max_position_embeddings == 64
    assert model.config.hidden_dropout_prob == 0.3


def test_tokenizer_from_a_vocabulary_file(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\n##s\n")
    args = make_args(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(vocabulary))
    assert load_tokenizer(args)("Hellos")["input_ids"] == [2, 5, 6, 3]
    cased = make_args(tokenizer_type="BertWordPieceCase", vocab_file=str(vocabulary))
    assert load_tokenizer(cased)("Hello")["input_ids"] == [2, 1, 3]
    with pytest.raises(ConfigurationError, match=r"--vocab-file needs --tokenizer-type"):
        load_tokenizer(make_args(vocab_file=str(vocabulary)))
    with pytest.raises(ModelError, match=r"no vocabulary file nowhere.txt"):
        load_tokenizer(make_args(vocab_file="nowhere.txt", tokenizer_type="BertWordPieceCase"))


def test_image_processor_from_sizes() -> None:
    processor = load_image_processor(make_args(model_type="vit", image_size=12, patch_size=4))
    assert processor.size["height"] == 12


def test_bad_models_are_reported(folder: Path, tmp_path: Path) -> None:
    def build(auto_class: str = "AutoModelForMaskedLM", **values: Any) -> None:
        build_pretrained(auto_class, make_args(**values))

    with pytest.raises(ModelError, match=r"There is no model: give a model with"):
        build()
    with pytest.raises(ModelError, match=r"neither a local folder nor in the local cache, and the "
                                         "Hugging Face Hub cannot be reached"):  # fmt: skip
        build(pretrained_model_name_or_path="bert-base-cased")
    missing = str(folder.parent / (folder.name + "x"))
    with pytest.raises(ModelError, match=rf"no model folder .*Did you mean .*{folder.name}\?"):
        build(pretrained_model_name_or_path=missing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"lacks config.json: it holds nothing"):
        build(pretrained_model_name_or_path=str(tmp_path / "empty"))
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks weights \(model.safetensors .*--from-scratch"):
        build(pretrained_model_name_or_path=str(tmp_path / "bare"))
    shutil.copytree(folder, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(ModelError, match=r"damaged|cannot be loaded"):
        build(pretrained_model_name_or_path=str(tmp_path / "cut"))
    shutil.copytree(folder, tmp_path / "json")
    (tmp_path / "json" / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot be loaded"):
        build(pretrained_model_name_or_path=str(tmp_path / "json"))
    with pytest.raises(
        ModelError, match=r"cannot do this task: its architecture has no AutoModelForI"
    ):
        build("AutoModelForImageClassification", pretrained_model_name_or_path=str(folder))
    with pytest.raises(ModelError, match=r"--model-type brt is not .*Did you mean bert\?"):
        build(model_type="brt")
    with pytest.raises(
        ConfigurationError, match=r"hidden size 10 does not divide into 4 .* 1, 2 or 5"
    ):
        build(model_type="bert", hidden_size=10, num_attention_heads=4)
    with pytest.raises(ModelError, match=r"lacks a tokenizer .tokenizer.json"):
        load_tokenizer(make_args(pretrained_model_name_or_path=str(folder)))
