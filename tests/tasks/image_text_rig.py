"""Tiny models that read images, with processors, and rows about coloured squares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, set_seed
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rapidformer.compat.transformers_processors import loading_without_torchvision

FAMILIES = ("qwen3_vl", "gemma3", "idefics3", "llava", "mistral3")
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220)}
_WORDS = [
    "<pad>", "<s>", "</s>", "<unk>", "<end>", "user", "assistant", "system", "what", "colour", "is",
    "the", "first", "second", "square", "?", ":", ".", "red", "green", "blue", "and", "a", "yes",
    "hello", "\n", "\n\n",
]  # fmt: skip
_PARTS = (
    "{% for turn in messages %}{{ turn['role'] + ' : ' }}{% for part in turn['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE {% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ ' <end> ' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)
_IDEFICS = {
    "image_token": "<image>", "fake": "<fake_token_around_image>", "end": "<end_of_utterance>",
    "whole": "<global-img>",
    **{f"part_{r}{c}": f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)},
}  # fmt: skip
_SPECIAL = {
    "qwen3_vl": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
                 "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"},
    "gemma3": {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"},
    "idefics3": _IDEFICS,
    "llava": {"image_token": "<image>"},
    "mistral3": {"image": "[IMG]", "line": "[IMG_BREAK]", "last": "[IMG_END]"},
}  # fmt: skip
_SHOWN = {"qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>", "gemma3": "<boi>",
          "mistral3": "[IMG]"}  # fmt: skip


def build_tokenizer(family: str) -> Any:
    vocabulary = {word: number for number, word in enumerate(_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex("\n+"), "isolated")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens={"turn": "<end>", **_SPECIAL[family]},
    )  # fmt: skip


def build_processor(family: str) -> Any:
    tokenizer = build_tokenizer(family)
    template = _PARTS.replace("IMAGE", _SHOWN.get(family, "<image>"))
    with loading_without_torchvision():
        processor = _BUILDERS[family](tokenizer)
    processor.chat_template = template
    return processor


def _build_qwen(tokenizer: Any) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2,
        size={"shortest_edge": 64, "longest_edge": 1024},
    )  # fmt: skip
    return Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(patch_size=4))


def _build_gemma(tokenizer: Any) -> Any:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return Gemma3Processor(images, tokenizer, image_seq_length=4)


def _build_idefics(tokenizer: Any) -> Any:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=4)


def _build_llava(tokenizer: Any) -> Any:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = {"height": 16, "width": 16}
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
    return LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip


def _build_mistral(tokenizer: Any) -> Any:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    images = PixtralImageProcessorPil(patch_size={"height": 4, "width": 4},
                                      size={"longest_edge": 24})  # fmt: skip
    return PixtralProcessor(images, tokenizer, patch_size=4, spatial_merge_size=2)


_BUILDERS = {
    "qwen3_vl": _build_qwen, "gemma3": _build_gemma, "idefics3": _build_idefics,
    "llava": _build_llava, "mistral3": _build_mistral,
}  # fmt: skip
_TEXT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip


def build_config(family: str) -> Any:
    tokenizer = build_tokenizer(family)
    ids = {name: tokenizer.convert_tokens_to_ids(text) for name, text in _SPECIAL[family].items()}
    text: dict[str, Any] = {**_TEXT, "vocab_size": len(tokenizer)}
    vision = dict(_VISION)
    more: dict[str, Any] = {}
    if family == "qwen3_vl":
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0,
                                   "mrope_section": [2, 1, 1]}  # fmt: skip
        vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
                  "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
                  "out_hidden_size": 16, "num_position_embeddings": 16,
                  "deepstack_visual_indexes": [0]}  # fmt: skip
        more = {"image_token_id": ids["image_token"], "video_token_id": ids["video_token"],
                "vision_start_token_id": ids["vision_start"],
                "vision_end_token_id": ids["vision_end"]}  # fmt: skip
    elif family == "gemma3":
        text |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
        more = {"mm_tokens_per_image": 4, "boi_token_index": ids["boi_token"],
                "eoi_token_index": ids["eoi_token"],
                "image_token_index": ids["image_token"]}  # fmt: skip
    elif family == "idefics3":
        more = {"image_token_id": ids["image_token"], "scale_factor": 1, "pad_token_id": 0}
    elif family == "llava":
        vision |= {"model_type": "clip_vision_model", "projection_dim": 16}
        text["model_type"] = "llama"
        more = {"image_token_index": ids["image_token"], "vision_feature_layer": -1}
    else:
        vision |= {"model_type": "pixtral", "patch_size": 4, "image_size": 24, "head_dim": 8}
        text["model_type"] = "mistral"
        more = {"image_token_index": ids["image"], "spatial_merge_size": 2,
                "vision_feature_layer": -1}  # fmt: skip
    return CONFIG_MAPPING[family](text_config=text, vision_config=vision, **more)


def build_model(family: str) -> nn.Module:
    set_seed(7)
    model: nn.Module = AutoModelForImageTextToText.from_config(build_config(family))
    for parameter in model.parameters():  # larger than usual: gradients of all parts should show
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def save_family(family: str, folder: Path) -> Path:
    """A checkpoint of the family, as on the Hub."""
    folder = folder / family
    build_model(family).save_pretrained(folder)
    build_processor(family).save_pretrained(folder)
    return folder


def build_image(colour: str, width: int = 20, height: int = 16) -> Any:
    from PIL import Image

    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[3:-3, 3:-3] = COLOURS[colour]
    return Image.fromarray(pixels)


def build_rows(count: int) -> list[dict[str, Any]]:
    """Rows with one image, with two, and without, of unequal lengths and sizes."""
    rows: list[dict[str, Any]] = []
    names = list(COLOURS)
    for number in range(count):
        first, second = names[number % 3], names[(number // 2) % 3]
        image = {"type": "image"}
        kind = number % 4
        if kind == 0:
            content = [image, {"type": "text", "text": "what colour is the square ?"}]
            images, answer = [build_image(first, 16 + 4 * (number % 3))], f"the square is {first}"
        elif kind == 1:
            text = {"type": "text", "text": "the first"}
            content = [text, image, {**text, "text": "and the second"}, image]
            images, answer = [build_image(first), build_image(second)], f"{first} and {second}"
        else:
            content = [{"type": "text", "text": "hello what is a square ?" if kind == 2 else "?"}]
            images, answer = [], "a square" if kind == 2 else "yes"
        turns = [{"role": "user", "content": content},
                 {"role": "assistant", "content": [{"type": "text", "text": answer}]}]  # fmt: skip
        rows.append({"messages": turns, "images": images})
    return rows
