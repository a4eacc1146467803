"""``rapidformer export --format gguf``: read back by transformers, and its Modelfile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rapidformer
from rapidformer.checkpoint.exporting import plain_process, proof
from rapidformer.checkpoint.exporting.gguf import families, modelfile
from rapidformer.checkpoint.exporting.gguf.tokenizer import describe_tokenizer
from rapidformer.errors import ConfigurationError, ModelError
from tests.small import make_model_folder, make_tokenizer

from .go_templates import render_go
from .test_exporting import train

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")
TEXTS = ["Hello world! It's 2026, and we've 123 things.\n\n  f(x) ", "Größe, 你好 🦙"]


def make_byte_level(pattern: str | None = None, **options: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    options = {"eos_token": "<|endoftext|>", "chat_template": CHATML, **options}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 288,
}  # fmt: skip
SCALED = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=SCALED))
    elif kind == "mistral":
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=32))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
    elif kind == "gemma3":
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **GEMMA))
    elif kind == "gemma2":
        model = Gemma2ForCausalLM(Gemma2Config(**SIZES, **GEMMA))
    else:
        config = GPT2Config(
            vocab_size=288, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=0,
            bos_token_id=0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof without the seconds that a new process needs to import torch."""

    def compute(folder: Path, rows: plain_process.Rows) -> Any:
        return plain_process.compute_outputs(plain_process.load_model(folder), rows)

    monkeypatch.setattr(proof, "_compute_plainly", compute)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path / "llama")
    make_byte_level(LLAMA_3).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


PATTERNS = {"llama": LLAMA_3, "mistral": LLAMA_3, "qwen2": QWEN_2, "qwen3": QWEN_2}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2"])
def test_transformers_reads_the_trained_model(kind: str, tmp_path: Path) -> None:
    make_model(kind).save_pretrained(tmp_path / "model")
    tokenizer = make_byte_level(PATTERNS.get(kind))
    tokenizer.save_pretrained(tmp_path / "model")
    found = rapidformer.export(tmp_path / "model", tmp_path / "out", format="gguf", dtype="fp32")
    assert found.proof and found.proof.limit == 1e-4 and found.proof.largest < 1e-4
    if kind not in ("llama", "qwen3", "gpt2"):
        return
    found = rapidformer.export(tmp_path / "model", tmp_path / "q8", format="gguf", quantize="q8_0")
    assert found.dtype == "Q8_0" and found.proof and 1e-4 < found.proof.relative < 0.05
    reader = gguf.GGUFReader(tmp_path / "q8" / "q8-Q8_0.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["token_embd.weight"] == "Q8_0" and types["output_norm.weight"] == "F32"
    assert reader.fields["tokenizer.chat_template"].contents() == CHATML
    assert reader.fields["tokenizer.ggml.tokens"].contents()[280] == "[PAD280]"
    assert reader.fields["tokenizer.ggml.eot_token_id"].contents() == 2
    if kind != "llama":  # of Llama's tokenizer, transformers reads another way to split texts
        again = AutoTokenizer.from_pretrained(tmp_path / "q8", gguf_file="q8-Q8_0.gguf")
        assert [again(text)["input_ids"] for text in TEXTS] == [
            tokenizer(text)["input_ids"] for text in TEXTS
        ]


def test_a_file_with_other_weights_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    wrong = families.Family("llama", families._FAMILIES["llama"].describe, forget)
    monkeypatch.setitem(families._FAMILIES, "llama", wrong)
    with pytest.raises(
        ModelError, match=r"GGUF reader computes other logits.*Nothing was exported"
    ):
        rapidformer.export(llama, tmp_path / "out", format="gguf")
    assert not (tmp_path / "out").exists()


def test_heads_norms_and_layers_are_rearranged() -> None:
    config = LlamaConfig(**{**SIZES, "num_key_value_heads": 1})
    rows = torch.arange(8.0)[:, None]
    llama = families._FAMILIES["llama"]
    changed = llama.change(config, "model.layers.0.self_attn.k_proj.weight", rows)
    assert changed.flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert llama.change(config, "model.layers.0.self_attn.v_proj.weight", rows) is rows
    gemma = families._FAMILIES["gemma3_text"]
    assert gemma.change(config, "model.norm.weight", torch.zeros(2)).tolist() == [1, 1]
    gpt = families._FAMILIES["gpt2"]
    assert gpt.change(config, "h.0.mlp.c_fc.weight", torch.zeros(2, 3)).shape == (3, 2)


def test_scaled_frequencies_are_those_of_transformers() -> None:
    config = LlamaConfig(**{**SIZES, "hidden_size": 128}, rope_parameters=SCALED)
    plain = 5000.0 ** -(torch.arange(0, 32, 2) / 32)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = families.compute_rope_factors(config)
    assert factors is not None
    assert len(set(factors.tolist())) > 3
    torch.testing.assert_close(plain / factors, scaled)


def test_an_adapter_is_merged(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    run = train(model, tmp_path / "run", lora_rank=2)
    found = rapidformer.export(run, tmp_path / "out", format="gguf")
    assert found.is_merged and found.proof and found.proof.relative < 1e-4
    with pytest.raises(ConfigurationError, match="--no-merge has no meaning for --format gguf"):
        rapidformer.export(run, tmp_path / "alone", format="gguf", merge=False)


def test_k_quants_are_llama_cpps_work(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export() -> Any:
        return rapidformer.export(llama, tmp_path / "out", format="gguf", quantize="q4_k_m")

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"needs llama-quantize of llama\.cpp"):
        export()
    program = tmp_path / "llama-quantize"
    program.write_text("#!/bin/sh\necho 'tensor too small' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(ModelError, match=r"llama-quantize failed: tensor too small\."):
        export()
    program.write_text('#!/bin/sh\n/bin/cp "$1" "$2"\n')
    found = export()
    # What a copy holds is the model itself; the limit is that of the nearest simple type.
    assert found.proof.relative < 1e-6 and 1e-2 < found.proof.limit <= 0.5
    assert {file.name for file in (tmp_path / "out").glob("*.gguf")} == {"out-Q4_K_M.gguf"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_act": "relu"}, "no equivalent of hidden_act relu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
         "no equivalent of rope_type dynamic in a llama model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "causal language models of these"),
    ],
)  # fmt: skip
def test_what_llama_cpp_does_not_compute_is_refused(
    changes: dict[str, Any], text: str, llama: Path, tmp_path: Path
) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=text):
        rapidformer.export(llama, tmp_path / "out", format="gguf", verify=False)


def test_other_settings_are_refused(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigurationError, match=r"--quantize q9 is unknown: use q8_0, q3_k_s, "):
        rapidformer.export(llama, out, format="gguf", quantize="q9")
    with pytest.raises(ConfigurationError, match="--quantize q8_0 needs --format gguf"):
        rapidformer.export(llama, out, quantize="q8_0")
    with pytest.raises(ConfigurationError, match="--quantize q8_0 needs no --dtype"):
        rapidformer.export(llama, out, format="gguf", quantize="q8_0", dtype="fp32")
    make_model_folder(tmp_path / "bert")
    with pytest.raises(ModelError, match="BertForSequenceClassification of type bert cannot be"):
        rapidformer.export(tmp_path / "bert", out, format="gguf")


# ---- tokenizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name"), [(None, "gpt-2"), (LLAMA_3, "llama-bpe"), (QWEN_2, "qwen2")]
)
def test_the_way_to_split_texts_is_named(pattern: str | None, name: str) -> None:
    keys = describe_tokenizer(make_byte_level(pattern), 288)
    assert keys["tokenizer.ggml.pre"] == name
    assert keys["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert keys["tokenizer.ggml.token_type"][-1] == 5
    assert keys["tokenizer.ggml.add_bos_token"] is False


def make_sentence_piece(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    pieces = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", *(x + y for x, y in merges)]
    model = models.BPE(
        {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, list(merges),
        byte_fallback=True, unk_token="<unk>",
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def test_sentence_piece_merges_by_scores(caplog: pytest.LogCaptureFixture) -> None:
    merges = [("a", "b"), ("▁", "a"), ("▁a", "b"), ("▁", "ab")]
    with caplog.at_level("INFO", logger="rapidformer"):
        keys = describe_tokenizer(make_sentence_piece(*merges), 10)
    assert "llama.cpp also puts a space after each special token" in caplog.text
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.tokens"][7:] == ["ab", "▁a", "▁ab"]
    assert keys["tokenizer.ggml.scores"][7:] == [0.0, -1.0, -2.0]
    # <s> is special, <0x0A> a byte
    assert keys["tokenizer.ggml.token_type"][:5] == [2, 3, 1, 6, 1]
    assert keys["tokenizer.ggml.add_space_prefix"] is True


def test_sentence_piece_with_other_merges_is_refused() -> None:
    """llama.cpp would also merge ▁ and ab, of which this tokenizer says nothing."""
    text = "would also make '▁ab' of '▁' and 'ab', which is no merge"
    with pytest.raises(ModelError, match=text):
        describe_tokenizer(make_sentence_piece(("a", "b"), ("▁", "a"), ("▁a", "b"), ("b", "b")), 11)


def test_unigram_has_its_scores() -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.5), ("b", -2.5)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    keys = describe_tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"), 3
    )
    assert keys["tokenizer.ggml.model"] == "t5"
    assert keys["tokenizer.ggml.scores"] == [0.0, -1.5, -2.5]
    assert keys["tokenizer.ggml.add_space_prefix"] is True


def make_lowercase() -> Any:
    tokenizer = make_byte_level(LLAMA_3)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (make_tokenizer, "llama.cpp has no WordLevel tokenizer"),
        (make_lowercase, "llama.cpp has no Lowercase normalizer"),
        (lambda: make_byte_level(r"\d"), "way to split a text is none that we know in llama.cpp"),
        (lambda: make_byte_level(LLAMA_3), "it has 280 tokens, the model 100 rows"),
    ],
)
def test_other_tokenizers_are_refused(tokenizer: Any, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        describe_tokenizer(tokenizer(), 100)


# ---- Ollama's Modelfile --------------------------------------------------------------------------

LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim + "
    "'<|im_end|>' }}{% endfor %}{{ '<|assistant|>' }}"
)
FOLDED = (
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}"
    "{% endif %}{% for m in rest %}{{ '[' + m['role'] + ']' + (first if loop.first else '') + "
    "m['content'] + '<|im_end|>\n' }}{% endfor %}{{ '[assistant]<think>' }}"
)
STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{{ 'assistant: ' }}"
)
NUMBERED = "{% for m in messages %}{{ loop.index ~ m['role'] ~ m['content'] }}{% endfor %}"


def write(template: str | None, folder: Path, caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    tokenizer = make_byte_level(chat_template=template, bos_token="<|endoftext|>")
    keys = {"tokenizer.ggml.add_bos_token": template == LLAMA, "llama.context_length": 64}
    with caplog.at_level("INFO", logger="rapidformer"):
        modelfile.write_modelfile(folder / "Modelfile", "x.gguf", tokenizer, keys)
    return (folder / "Modelfile").read_text(), caplog.text


def test_the_modelfile_says_what_the_chat_template_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, said = write(CHATML, tmp_path, caplog)
    assert text == (
        'FROM ./x.gguf\nTEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n'
        "<|im_start|>user\n{{ else }}<|im_start|>user\n{{ end }}{{ range $i, $_ := .Messages }}"
        '{{ if eq .Role "user" }}{{ .Content }}<|im_end|>\n<|im_start|>assistant\n'
        '{{ else if eq .Role "assistant" }}{{ .Content }}<|im_end|>\n<|im_start|>user\n'
        '{{ end }}{{ end }}"""\nPARAMETER num_ctx 64\nPARAMETER stop "<|im_end|>"\n'
    )
    assert "TEMPLATE equal to the chat template for 6 conversations\n" in said


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LLAMA, "for 6 conversations; it keeps spaces around a message, which theirs removes"),
        (FOLDED, "for 6 conversations"),
        (STRICT, "for 4 conversations; the chat template takes no system prompt, so Ollama's is"),
        (NUMBERED, "without a TEMPLATE: no simple template gives what the tokenizer's gives for"),
        ("{{ messages[-1]['content'] }}", "without a TEMPLATE: there is no chat template that"),
        (None, "without a TEMPLATE: there is no chat template that writes messages one by one"),
    ],
    ids=["llama", "folded system, thinking", "no system", "numbered", "last only", "none"],
)
def test_a_modelfile_is_equal_or_has_no_template(
    template: str | None, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, log = write(template, tmp_path, caplog)
    assert said in log
    assert ("TEMPLATE" in text.replace("No TEMPLATE", "")) == ("without" not in said)
    assert "<|endoftext|>" not in text  # Ollama adds the first token itself


def test_a_go_template_is_rendered_as_by_go() -> None:
    """These renderings were compared with those of Go's text/template."""
    template = (
        "{{ if .System }}S:{{ .System }};{{ else }}none;{{ end }}{{ range $i, $_ := .Messages }}"
        '{{ if eq .Role "user" }}U:{{ .Content }}{{ if eq (len (slice $.Messages $i)) 1 }}!'
        '{{ else }},{{ end }}{{ else if eq .Role "assistant" }}A:{{ .Content }}.{{ end }}{{ end }}'
    )
    talk = modelfile._talk("x", "y", "z")
    assert render_go(template, talk) == "none;U:x,A:y.U:z!"
    talk = modelfile._talk("x", system="s")
    assert render_go(template, talk) == "S:s;U:x!"


@pytest.mark.parametrize("talk", modelfile.SAMPLES)
@pytest.mark.parametrize("system", [None, ("S:", ";U:")])
@pytest.mark.parametrize("last", ["!", ",A:"])
def test_a_go_template_says_what_was_proven(
    talk: modelfile.Conversation, system: tuple[str, str] | None, last: str
) -> None:
    turns = modelfile.Turns(begin="none;U:", system=system, answer=",A:", question=".U:", last=last)
    assert render_go(modelfile.translate(turns), talk) == turns.join(talk)


@pytest.mark.parametrize("piece", ["{{ .Content }}", "{", 'a """'])
def test_go_would_not_take_every_text_around_messages(piece: str) -> None:
    turns = modelfile.Turns(begin=piece, system=None, answer="", question="", last="")
    with pytest.raises(modelfile._NoTemplateError, match="the text around messages has"):
        modelfile.translate(turns)
