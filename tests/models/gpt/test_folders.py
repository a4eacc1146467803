"""Saved, loaded and asked for text: what transformers does with a model, it does with this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rapidformer.checkpoint.export import export_model
from rapidformer.dist.topology import Topology
from rapidformer.errors import ModelError
from rapidformer.models import GPTForCausalLM, GPTModel
from rapidformer.models.own_loss import shifts_labels

from .small import (
    EXPERTS,
    KINDS,
    LENGTH,
    VOCABULARY,
    get_losses,
    hide_future,
    make_model,
    make_tokens,
)


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str, tmp_path: Path) -> None:
    model, tokens = make_model(**KINDS[kind]).eval(), make_tokens()
    model.save_pretrained(tmp_path)
    loaded = GPTModel.from_pretrained(tmp_path)
    assert {**loaded.config.to_dict(), "_name_or_path": ""} == model.config.to_dict()
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert torch.equal(loaded(tokens), model(tokens))
    is_tied = loaded.output.weight is loaded.word_embeddings.weight
    assert is_tied is model.config.tie_word_embeddings


def test_tied_weight_is_stored_once_and_learns_as_one(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert len({"output.weight", "word_embeddings.weight"} & stored.keys()) == 1
    loaded, tokens = GPTModel.from_pretrained(tmp_path), make_tokens()
    get_losses(loaded, tokens, tokens).mean().backward()
    with torch.no_grad():
        loaded.word_embeddings.weight -= loaded.word_embeddings.weight.grad
    assert torch.equal(loaded.output.weight, loaded.word_embeddings.weight)


def test_weights_that_a_folder_lacks_start_as_fresh_ones(tmp_path: Path) -> None:
    make_model(init_method_std=0.02).save_pretrained(tmp_path)
    loaded = GPTModel.from_pretrained(tmp_path, **EXPERTS)
    experts = loaded.layers[1].feed_forward.experts
    assert experts.up.std().item() == pytest.approx(0.02, rel=0.05)
    assert experts.down.std().item() == pytest.approx(0.01, rel=0.05)


def test_export_writes_the_same_folder(tmp_path: Path) -> None:
    model, tokens = make_model(**EXPERTS), make_tokens()
    export_model(model, tmp_path / "out", Topology())
    assert torch.equal(GPTModel.from_pretrained(tmp_path / "out")(tokens), model(tokens))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("rapidformer_gpt", ["GPTModel"])


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_the_likeliest_token_each_time(kind: str) -> None:
    model, prompt = make_model(**KINDS[kind]).eval(), make_tokens(rows=2, length=5)
    expected = prompt
    with torch.no_grad():
        for _ in range(8):
            following = model(expected)[:, -1].argmax(-1, keepdim=True)
            expected = torch.cat([expected, following], dim=1)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), expected)
    assert torch.equal(model.generate(prompt, use_cache=False, **options), expected)
    assisted = model.generate(prompt[:1], prompt_lookup_num_tokens=2, **options)
    assert torch.equal(assisted, expected[:1])


@pytest.mark.parametrize("kind", ["megatron", "modern"])
def test_padded_prompts_continue_as_they_would_alone(kind: str) -> None:
    model, prompts = make_model(**KINDS[kind]).eval(), make_tokens(rows=2, length=6)
    mask = torch.ones_like(prompts)
    mask[1, :3] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    together = model.generate(prompts, attention_mask=mask, **options)
    alone = model.generate(prompts[1:, 3:], attention_mask=mask[1:, 3:], **options)
    assert torch.equal(together[1, 6:], alone[0, 3:])


def test_several_tokens_after_a_cache_stay_causal() -> None:
    from transformers import DynamicCache

    model, tokens = make_model().eval(), make_tokens()
    cache = DynamicCache(config=model.config)
    model(tokens[:, :5], past_key_values=cache, return_dict=True)
    rest = model(tokens[:, 5:], past_key_values=cache, return_dict=True).logits
    torch.testing.assert_close(rest, model(tokens)[:, 5:], atol=1e-4, rtol=1e-4)


def test_padding_of_the_vocabulary_is_never_generated(tmp_path: Path) -> None:
    model, prompt = make_model(tokenizer_vocab_size=10).eval(), make_tokens(length=4) % 10
    assert (model(prompt)[:, -1].argmax(-1) >= 10).any()
    model.save_pretrained(tmp_path)
    for each in (model, GPTModel.from_pretrained(tmp_path)):
        text = each.generate(prompt, max_new_tokens=8, do_sample=False)
        assert text.max() < 10 < VOCABULARY


def test_fixed_size_cache_is_refused() -> None:
    with pytest.raises(ModelError, match="growing cache"):
        make_model().generate(make_tokens(), max_new_tokens=2, cache_implementation="static")


@pytest.mark.parametrize("kind", ["megatron", "experts"])
def test_auto_class_gives_hugging_faces_form(kind: str, tmp_path: Path) -> None:
    """Labels equal the inputs there, and the loss is the mean over what is predicted."""
    model, tokens = make_model(**KINDS[kind]).eval(), make_tokens()
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs) is GPTForCausalLM and shifts_labels(theirs)
    labels = tokens.clone()
    labels[:, 4:6] = -100
    mask = torch.ones_like(tokens)
    output = theirs(input_ids=tokens, attention_mask=mask, labels=labels)
    torch.testing.assert_close(output.logits, model(tokens), atol=1e-4, rtol=1e-4)
    losses, *moe_losses = _as_tuple(model(tokens[:, :-1], labels=labels[:, 1:]))
    expected = losses.sum() / (labels[:, 1:] != -100).sum()
    if moe_losses:
        # The last token has no label, but it goes through the experts too.
        _, *moe_losses = model(tokens, labels=labels)
        expected = expected + 0.01 * sum(moe_losses)
    torch.testing.assert_close(output.loss, expected)
    prompt = tokens[:, :4]
    text = theirs.generate(prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(text, model.generate(prompt, max_new_tokens=4, do_sample=False))


def test_masks_of_hugging_faces_form_say_where_one_may_look() -> None:
    model, tokens = make_model().eval(), make_tokens()
    mask = hide_future(LENGTH)
    mask[:, :, 6:, :6] = True
    theirs = GPTForCausalLM(model.config).eval()
    theirs.load_state_dict(model.state_dict())
    logits = theirs(tokens, attention_mask=~mask).logits
    assert torch.equal(logits, model(tokens, None, mask))
    assert not torch.allclose(logits, model(tokens), atol=1e-2)


def _as_tuple(output: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)
