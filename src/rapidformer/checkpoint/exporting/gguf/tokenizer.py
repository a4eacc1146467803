"""A tokenizer as a GGUF file's keys: pieces, scores or merges, special tokens, chat template.

llama.cpp has its own tokenizers, and a file only names one. What decides which is the definition of
the tokenizer itself, not a list of known models: a vocabulary of your own is as good as Llama's.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from rapidformer.checkpoint.exporting.gguf.families import Metadata
from rapidformer.errors import ModelError
from rapidformer.log import get_logger

# gguf.TokenType
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "▁"
# What llama.cpp does to a text too; NFC is left out, as in its own files of Qwen.
_NORMALIZERS = ("NFC", "Prepend", "Replace", "Precompiled", "Strip")
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n"
# By the pattern at which a tokenizer splits a text first, as its tokenizer.json has it.
_PATTERNS = {
    _ENDINGS + "|" + _WORDS + r"\p{L}+|\p{N}{1,3}" + _SIGNS + "]*" + _REST: "llama-bpe",
    _ENDINGS + "|" + _WORDS + r"\p{L}+|\p{N}" + _SIGNS + "]*" + _REST: "qwen2",
    _ENDINGS + "|" + _WORDS + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _REST:
        "qwen35",
    f"{_WORDS}{_LETTERS}*{_SMALL}+|{_WORDS}{_LETTERS}+{_SMALL}*" + r"|\p{N}" + _SIGNS + "/]*"
    + _REST: "tekken",
}  # fmt: skip


def describe_tokenizer(tokenizer: Any, vocabulary: int) -> Metadata:
    """The keys of a tokenizer for a model with that many rows of embeddings."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise _refuse("it has no tokenizer.json; load it with a fast tokenizer and save it again")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for step in _list_steps(content["normalizer"]):
        if step["type"] not in _NORMALIZERS:
            raise _refuse(f"llama.cpp has no {step['type']} normalizer")
    kind, keys = content["model"]["type"], dict[str, Any]()
    if kind == "BPE" and _find(content, "decoder", "ByteLevel"):
        merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
        keys = {"ggml.model": "gpt2", "ggml.pre": _find_pattern(content), "ggml.merges": merges}
    elif kind == "BPE" and content["model"].get("byte_fallback"):
        keys = _describe_sentence_piece(content)
    elif kind == "Unigram":
        keys = _describe_unigram(content)
    else:
        raise _refuse(f"llama.cpp has no {kind} tokenizer of this kind; byte-level BPE, BPE of "
                      "SentencePiece and Unigram can be written")  # fmt: skip
    tokens, types = _list_tokens(tokenizer, content, vocabulary)
    scores = keys.pop("scores", None)
    if scores is not None:
        keys["ggml.scores"] = [float(scores.get(token, 0.0)) for token in tokens]
    keys |= {"ggml.tokens": tokens, "ggml.token_type": types}
    for name in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{name}_token_id", None)
        if number is not None:
            full = {"unk": "unknown", "pad": "padding"}.get(name, name)
            keys[f"ggml.{full}_token_id"] = int(number)
    ids = tokenizer("a")["input_ids"]
    keys["ggml.add_bos_token"] = bool(ids) and ids[0] == tokenizer.bos_token_id
    keys["ggml.add_eos_token"] = bool(ids) and ids[-1] == tokenizer.eos_token_id
    template = get_chat_template(tokenizer)
    if template:
        keys["chat_template"] = template
    return {f"tokenizer.{name}": value for name, value in keys.items()}


def get_chat_template(tokenizer: Any) -> str | None:
    """The template for conversations, if there is one."""
    template = getattr(tokenizer, "chat_template", None)
    return template.get("default") if isinstance(template, dict) else template


def _list_tokens(
    tokenizer: Any, content: dict[str, Any], vocabulary: int
) -> tuple[list[str], list[int]]:
    """Every row's text and type; rows beyond the tokenizer's are unused."""
    numbers: dict[str, int] = tokenizer.get_vocab()
    if max(numbers.values(), default=0) >= vocabulary:
        raise _refuse(f"it has {max(numbers.values()) + 1:,} tokens, the model {vocabulary:,} rows")
    texts = {number: token for token, number in numbers.items()}
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(vocabulary)]
    types = [_NORMAL if number in texts else _UNUSED for number in range(vocabulary)]
    for number, text in texts.items():
        if content["model"].get("byte_fallback") and re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            types[number] = _BYTE
    for added in content["added_tokens"]:
        types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    unknown = tokenizer.unk_token_id
    if unknown is not None and content["model"].get("byte_fallback", False):
        types[unknown] = _UNKNOWN
    return tokens, types


# ---- three kinds ---------------------------------------------------------------------------------


def _find_pattern(content: dict[str, Any]) -> str:
    """llama.cpp's name for the way in which a text is split before anything is merged."""
    steps = _list_steps(content["pre_tokenizer"])
    levels = [step for step in steps if step["type"] == "ByteLevel"]
    others = [step for step in steps if step["type"] != "ByteLevel"]
    if len(levels) == 1 and not levels[0]["add_prefix_space"]:
        if levels[0].get("use_regex", True):
            if not others:
                return "gpt-2"
            if len(others) == 1 and others[0] == {"type": "Digits", "individual_digits": True}:
                return "smollm"
        elif len(others) == 1 and others[0]["type"] == "Split":
            name = _PATTERNS.get(others[0]["pattern"].get("Regex"))
            if name and others[0]["behavior"] == "Isolated" and not others[0]["invert"]:
                return name
    known = ", ".join(["gpt-2", "smollm", *_PATTERNS.values()])
    raise _refuse(f"its way to split a text is none that we know in llama.cpp ({known})")


def _describe_sentence_piece(content: dict[str, Any]) -> dict[str, Any]:
    """Pairs are merged by the score of the piece that they make, not by rules of their own."""
    merges = [m.split(" ") if isinstance(m, str) else m for m in content["model"]["merges"]]
    pairs, numbers = {tuple(pair) for pair in merges}, content["model"]["vocab"]
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(merges):
        scores.setdefault(left + right, -float(rank))
    for piece in scores:
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in numbers and right in numbers and (left, right) not in pairs:
                raise _refuse(
                    f"llama.cpp would also make {piece!r} of {left!r} and {right!r}, which is no "
                    "merge of this tokenizer"
                )
    adds_space = _adds_space(content)
    if adds_space and _find(content, "pre_tokenizer", "Metaspace"):
        get_logger().info(
            "tokenizer llama.cpp also puts a space after each special token, and a second one "
            "before a text that begins with one"
        )
    return {
        "ggml.model": "llama", "ggml.pre": "default", "scores": scores,
        "ggml.add_space_prefix": adds_space,
    }  # fmt: skip


def _describe_unigram(content: dict[str, Any]) -> dict[str, Any]:
    if content["model"].get("byte_fallback"):
        raise _refuse("llama.cpp's Unigram has no bytes for unknown characters")
    keys = {
        "ggml.model": "t5", "ggml.pre": "default", "scores": dict(content["model"]["vocab"]),
        "ggml.add_space_prefix": _adds_space(content),
        "ggml.remove_extra_whitespaces": any(
            step["type"] == "Replace" and step["pattern"].get("Regex") == " {2,}"
            for step in _list_steps(content["normalizer"])
        ),
    }  # fmt: skip
    charsmap = _find(content, "normalizer", "Precompiled")
    if charsmap:
        keys["ggml.precompiled_charsmap"] = base64.b64decode(charsmap["precompiled_charsmap"])
    return keys


def _adds_space(content: dict[str, Any]) -> bool:
    """Whether a text begins with a space that nobody wrote."""
    spaces = _find(content, "pre_tokenizer", "Metaspace")
    if spaces:
        return bool(spaces.get("prepend_scheme", "always") != "never")
    prepended = _find(content, "normalizer", "Prepend")
    return bool(prepended and prepended["prepend"] == _SPACE)


def _find(content: dict[str, Any], part: str, kind: str) -> dict[str, Any] | None:
    return next((step for step in _list_steps(content[part]) if step["type"] == kind), None)


def _list_steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder as its steps."""
    if part is None:
        return []
    inner = next((v for k, v in part.items() if part["type"] == "Sequence" and k != "type"), None)
    return [part] if inner is None else [step for one in inner for step in _list_steps(one)]


def _refuse(reason: str) -> ModelError:
    return ModelError(f"GGUF: the tokenizer cannot be written: {reason}. Nothing was exported.")
