from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel, SEWDConfig, SEWDForCTC

from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.models import build
from rapidformer.models.build import build_pretrained, load_image_processor, load_tokenizer
from rapidformer.models.weight_names import find_trunk

from .conftest import SMALL, make_args


def test_local_folder_in_fp32_with_a_fresh_head(folder: Path, caplog: Any, tmp_path: Path) -> None:
    args = make_args(pretrained_model_name_or_path=str(folder), num_layers=2)
    with caplog.at_level(logging.INFO, logger="rapidformer"):
        logging.getLogger("rapidformer").propagate = True
        model = build_pretrained("AutoModelForSequenceClassification", args, num_labels=5)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.num_labels == 5 and model.classifier.out_features == 5
    assert "classifier.weight (saved (3, 16), needed (5, 16))" in caplog.text
    caplog.clear()
    args.load = str(tmp_path)  # a run, whose checkpoint has trained the head
    build_pretrained("AutoModelForSequenceClassification", args, num_labels=5)
    assert "newly initialised" not in caplog.text


def rename(folder: Path, target: Path, change: Callable[[str], str]) -> str:
    """A copy of a model whose weights have other names."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    renamed = {change(name): weight for name, weight in weights.items()}
    save_file(renamed, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def test_weights_of_another_model_are_refused_by_name(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build(place: str, **values: Any) -> Any:
        args = make_args(pretrained_model_name_or_path=place, **values)
        return build_pretrained("AutoModelForSequenceClassification", args)

    prefixed = rename(folder, tmp_path / "prefixed", lambda name: f"module.{name}")
    with pytest.raises(ModelError, match="do not match BertForSequenceClassification:") as caught:
        build(prefixed)
    text = str(caught.value)
    assert "bert.encoder.layer.{0-1}.attention.output.dense.bias" in text
    assert "unexpected" in text and "module.bert.encoder.layer.{0-1}." in text
    assert "differ only by the prefix 'module.', which the file has and the model has not" in text
    assert "--allow-partial-load" in text
    misspelt = rename(folder, tmp_path / "misspelt", lambda n: n.replace("query", "querry"))
    with pytest.raises(ModelError, match=r"missing \(4\): .*\n  unexpected \(4\)") as caught:
        build(misspelt)
    assert (
        "did you mean: bert.encoder.layer.{0-1}.attention.self.querry.weight in the file for "
        "bert.encoder.layer.{0-1}.attention.self.query.weight in the model?" in str(caught.value)
    )
    with caplog.at_level(logging.WARNING, logger="rapidformer"):
        logging.getLogger("rapidformer").propagate = True
        build(misspelt, allow_partial_load=True)
    assert "are loaded in part (--allow-partial-load):\n  missing (4): " in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 3}, r"missing \(16\): bert.encoder.layer.2.attention"),
        ({"num_hidden_layers": 1}, r"unexpected \(16\): bert.encoder.layer.1.attention"),
        ({"vocab_size": 60}, r"wrong shape \(1\): bert.embeddings.word_embeddings.weight \("
                             r"saved \[50, 16\], needed \[60, 16\]\)"),
    ],
)  # fmt: skip
def test_a_model_of_another_size_is_refused(
    config: dict[str, int], message: str, folder: Path, tmp_path: Path
) -> None:
    place = shutil.copytree(folder, tmp_path / "model")
    content = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(content | config))
    with pytest.raises(ModelError, match=message):
        build_pretrained(
            "AutoModelForMaskedLM", make_args(pretrained_model_name_or_path=str(place))
        )


@pytest.mark.parametrize(
    "auto_class",
    ["AutoModel", "AutoModelForMaskedLM", "AutoModelForTokenClassification",
     "AutoModelForQuestionAnswering", "AutoModelForMultipleChoice"],
)  # fmt: skip
def test_a_new_head_on_a_trained_model_is_fine(
    auto_class: str, folder: Path, tmp_path: Path
) -> None:
    build_pretrained(auto_class, make_args(pretrained_model_name_or_path=str(folder)))
    # What a masked language model saves has no pooler, which classifiers need.
    trunk = rename(folder, tmp_path / "trunk", lambda name: name.replace("bert.pooler", "cls.old"))
    build_pretrained(auto_class, make_args(pretrained_model_name_or_path=trunk))


def test_a_trunk_may_have_another_name_than_its_class_says(tmp_path: Path) -> None:
    """A CLIP that classifies has its vision model alone; SEW-D's is not called ``sew-d``."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    vision = {**sizes, "num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
    CLIPModel(CLIPConfig(text_config=sizes, vision_config=vision)).save_pretrained(tmp_path / "c")
    args = make_args(pretrained_model_name_or_path=str(tmp_path / "c"))
    model = build_pretrained("AutoModelForImageClassification", args, num_labels=5)
    assert model.classifier.out_features == 5
    conv = {"conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (4,)}
    config = SEWDConfig(**sizes, **conv, num_hidden_layers=1, num_conv_pos_embedding_groups=2)
    assert find_trunk(SEWDForCTC(config)).prefix == "sew_d."


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


def test_a_model_larger_than_the_memory_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "measure_free_memory", lambda: 1000.0)
    for args in (
        make_args(model_type="bert", **SMALL),
        make_args(pretrained_model_name_or_path=str(folder)),
    ):
        with pytest.raises(ModelError, match=r"too large .* G parameters take .* GiB of memory"):
            build_pretrained("AutoModelForSequenceClassification", args)


def test_tokenizer_from_a_vocabulary_file(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\n##s\n")
    args = make_args(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(vocabulary))
    assert load_tokenizer(args)("Hellos")["input_ids"] == [2, 5, 6, 3]
    cased = make_args(tokenizer_type="BertWordPieceCase", vocab_file=str(vocabulary))
    assert load_tokenizer(cased)("Hello")["input_ids"] == [2, 1, 3]
    with pytest.raises(ConfigurationError, match=r"--vocab-file needs --tokenizer-type"):
        load_tokenizer(make_args(vocab_file=str(vocabulary)))


def test_image_processor_from_sizes() -> None:
    processor = load_image_processor(make_args(model_type="vit", image_size=12, patch_size=4))
    assert processor.size["height"] == 12


def test_bad_models_are_reported(folder: Path, tmp_path: Path) -> None:
    def build(auto_class: str = "AutoModelForMaskedLM", **values: Any) -> None:
        build_pretrained(auto_class, make_args(**values))

    with pytest.raises(ModelError, match=r"There is no model: give a model with"):
        build()
    with pytest.raises(ModelError, match=r"nor in the local cache, and the Hugging Face Hub "
                                         "cannot be reached"):  # fmt: skip
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
