"""Every family as GGUF and as ONNX, read back and compared: takes minutes, not in CI.

    python -m tests.borrowed.export_families

If the package xllamacpp is installed, llama.cpp itself also reads the GGUF files: its tokens, the
log-probabilities of its next token and its rendering of a conversation are compared as well. Its
GELU (Gemma, GPT-2) is a table in fp16, which costs about 1e-3.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import torch
import transformers

import rapidformer
from tests.checkpoint.test_gguf import PATTERNS, TEXTS, make_byte_level, make_model

_GGUF = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2")
_ONNX = (
    "BertForSequenceClassification", "BertModel", "BertForMaskedLM",
    "DistilBertForSequenceClassification", "ModernBertForTokenClassification",
    "RobertaForTokenClassification", "RobertaForQuestionAnswering",
    "XLMRobertaForSequenceClassification", "CamembertForTokenClassification",
    "ElectraForSequenceClassification", "DebertaForSequenceClassification",
    "DebertaV2ForSequenceClassification",
)  # fmt: skip
_SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "modernbert": {"local_attention": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
                   "cls_token_id": 1, "sep_token_id": 2},
    "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                   "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
}  # fmt: skip
_TALK = [
    {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Bye"},
]  # fmt: skip


def export_gguf(kind: str, folder: Path) -> None:
    model = make_model(kind).eval()
    model.save_pretrained(folder / kind)
    tokenizer = make_byte_level(PATTERNS.get(kind))
    tokenizer.save_pretrained(folder / kind)
    figures = []
    for name, options in (("F32", {"dtype": "fp32"}), ("Q8_0", {"quantize": "q8_0"})):
        out = folder / f"{kind}-{name}"
        proof = rapidformer.export(folder / kind, out, format="gguf", **options).proof
        assert proof is not None
        figures.append(f"{name} {proof.relative:.1e} (limit {proof.limit:.1e})")
    if importlib.util.find_spec("xllamacpp") is not None:
        (file,) = (folder / f"{kind}-F32").glob("*.gguf")
        figures.append(ask_llama_cpp(file, model, tokenizer))
    print(f"gguf {kind:10} {', '.join(figures)}", flush=True)


def ask_llama_cpp(file: Path, model: Any, tokenizer: Any) -> str:
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.warmup = str(file), 64, False
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.use_jinja = True
    server = xllamacpp.Server(settings)

    def ask(path: str, **content: Any) -> Any:
        url, kind = server.listening_address + path, {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(content).encode(), kind)
        return json.loads(urllib.request.urlopen(request).read())

    for text in [*TEXTS, tokenizer.apply_chat_template(_TALK, tokenize=False)]:
        found = ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
        assert found == tokenizer(text)["input_ids"], text
    prompt = tokenizer.apply_chat_template(_TALK, tokenize=False, add_generation_prompt=True)
    assert ask("/apply-template", messages=_TALK)["prompt"] == prompt
    worst, generator = 0.0, torch.Generator().manual_seed(0)
    for length in range(4, 31, 2):
        ids = torch.randint(5, 270, (1, length), generator=generator)
        answer = ask("/completion", prompt=ids[0].tolist(), n_predict=1, n_probs=10, samplers=[],
                     cache_prompt=False)  # fmt: skip
        expected = model(ids).logits[0, -1].double().log_softmax(-1)
        # Nothing is said of a token that is only part of a character.
        for entry in answer.get("completion_probabilities", [{"top_logprobs": []}])[0][
            "top_logprobs"
        ]:
            worst = max(worst, abs(expected[entry["id"]].item() - entry["logprob"]))
    return f"llama.cpp: log-probabilities {worst:.1e}, tokens and chat template equal"


def export_onnx(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    kind = model_class.config_class.model_type
    sizes = _SIZES
    if kind == "distilbert":
        names = {"hidden_size": "dim", "num_hidden_layers": "n_layers",
                 "num_attention_heads": "n_heads", "intermediate_size": "hidden_dim"}  # fmt: skip
        sizes = {names.get(key, key): value for key, value in _SIZES.items()}
    model = model_class(model_class.config_class(**sizes, **_OWN.get(kind, {})))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder / name)
    proof = rapidformer.export(folder / name, folder / f"{name}-onnx", format="onnx").proof
    assert proof is not None
    print(f"onnx {name:36} largest {proof.largest:.1e} (limit {proof.limit:.1e})", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        for kind in _GGUF:
            export_gguf(kind, Path(place))
        for name in _ONNX:
            export_onnx(name, Path(place))
    os._exit(0)  # llama.cpp's servers would wait for each other


if __name__ == "__main__":
    main()
