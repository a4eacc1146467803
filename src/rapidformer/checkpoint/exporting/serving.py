"""What vLLM and ``transformers serve`` need of a language model's folder, checked by rules.

Neither is started: the rules are what makes them fail, or answer wrongly, with a folder that plain
transformers loads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.exporting.files import load_tokenizer
from rapidformer.checkpoint.exporting.gguf.modelfile import find_end, read_turns
from rapidformer.checkpoint.exporting.gguf.tokenizer import get_chat_template
from rapidformer.checkpoint.publish import read_json
from rapidformer.log import get_logger

_LARGEST_RANK = 16
"""vLLM's --max-lora-rank, unless it is given."""
# Those that vLLM computes with code of its own; it runs others through transformers.
_KNOWN = (
    "BloomForCausalLM", "CohereForCausalLM", "DeepseekV3ForCausalLM", "FalconForCausalLM",
    "GPT2LMHeadModel", "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
    "GemmaForCausalLM", "GlmForCausalLM", "GptOssForCausalLM", "GraniteForCausalLM",
    "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "OPTForCausalLM",
    "Olmo2ForCausalLM", "Phi3ForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
)  # fmt: skip


@dataclass(frozen=True)
class Serving:
    """What was checked, and what is wrong."""

    passed: list[str]
    problems: list[str]


def check_serving(folder: Path) -> Serving | None:
    """Look at a folder as those who serve it do; None if it is no language model's."""
    config = read_json(folder / "config.json", or_nothing=True)
    name = str(next(iter(config.get("architectures") or ()), ""))
    if not name.endswith(("ForCausalLM", "LMHeadModel")):
        return None
    tokenizer = load_tokenizer(folder)
    own_code = f"vLLM may have no code of its own for {name}, and then runs it through transformers"
    found = {
        "architecture": None if name in _KNOWN else own_code,
        "weights": _check_weights(folder),
        "dtype": _check_dtype(config),
        "tokenizer": _check_tokenizer(folder, tokenizer, config),
        "chat template": _check_template(tokenizer),
        "end of an answer": _check_end(folder, tokenizer, config),
    }
    passed = [what for what, problem in found.items() if problem is None]
    problems = [f"{what}: {problem}" for what, problem in found.items() if problem is not None]
    say = get_logger().info
    say("serving   vLLM, transformers serve: %s passed", ", ".join(passed) or "nothing")
    for problem in problems:
        say("serving   problem with the %s", problem)
    return Serving(passed, problems)


def _check_weights(folder: Path) -> str | None:
    index = folder / "model.safetensors.index.json"
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        rank = read_json(adapter).get("r", 0)
        needs = f"start vLLM with --enable-lora --max-lora-rank {rank} or more"
        return needs if isinstance(rank, int) and rank > _LARGEST_RANK else None
    if not index.is_file():
        missing = not (folder / "model.safetensors").is_file()
        return "there is no model.safetensors" if missing else None
    files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    lost = sorted(name for name in files if not (folder / name).is_file())
    return f"the index names {lost[0]}, which is not there" if lost else None


def _check_dtype(config: dict[str, Any]) -> str | None:
    kind = config.get("dtype") or config.get("torch_dtype")
    if kind == "float32":
        return (
            "fp32: vLLM computes in 16 bits unless it is told --dtype float32; export with --dtype "
            "bf16"
        )
    return None if kind else "config.json does not say it"


def _check_tokenizer(folder: Path, tokenizer: Any, config: dict[str, Any]) -> str | None:
    if tokenizer is None:
        return "there is none that loads"
    if len(tokenizer) > config.get("vocab_size", 0):
        return f"it has {len(tokenizer):,} tokens, the model {config.get('vocab_size', 0):,} rows"
    settings = read_json(folder / "tokenizer_config.json", or_nothing=True)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        return "its class TokenizersBackend needs transformers 5 where it is served"
    return None


def _check_template(tokenizer: Any) -> str | None:
    if tokenizer is None or not get_chat_template(tokenizer):
        return "there is none: /v1/completions works, /v1/chat/completions does not"
    if read_turns(tokenizer) is None:
        return "it does not render a question, an answer and a question"
    return None


def _check_end(folder: Path, tokenizer: Any, config: dict[str, Any]) -> str | None:
    if tokenizer is None:
        return "not known without a tokenizer"
    settings = read_json(folder / "generation_config.json", or_nothing=True)
    ends = settings.get("eos_token_id", config.get("eos_token_id"))
    known = set(ends if isinstance(ends, list) else [ends])
    turns = read_turns(tokenizer) if get_chat_template(tokenizer) else None
    end = (find_end(tokenizer, turns) if turns else None) or tokenizer.eos_token
    if end is None:
        return "no token is known for it"
    number = tokenizer.convert_tokens_to_ids(end)
    if number in known:
        return None
    return f"{end} ({number}) is not in eos_token_id of generation_config.json ({ends})"
