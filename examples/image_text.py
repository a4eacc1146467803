"""Learn to answer questions about pictures on a CPU: which colour, which shape?

Draws coloured shapes, writes a tiny LLaVA with random weights, and trains all of it with the
command that is printed: one picture per row, two, or none. Then it asks about one that was held
out. All of it took 80 seconds of processor time.

    python examples/image_text.py [FOLDER] [--epochs 2 ...]
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 60, 220)}
SHAPES = ("circle", "square", "cross")
WORDS = ["<end>", "<pad>", "<unknown>", "user", "assistant", "what", "is", "this", "which",
         "colours", "?", "a", "and", "hello", "there"]  # fmt: skip
TEMPLATE = (
    "{% for turn in messages %}{{ turn['role'] + ' ' }}{% for part in turn['content'] %}"
    "{{ '<image> ' if part['type'] == 'image' else part['text'] }}{% endfor %}{{ ' <end> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
SETTINGS = ("--train-vision", "--train-projector", "--epochs", "6", "--micro-batch-size", "16",
            "--lr", "3e-3", "--log-interval", "10", "--nproc-per-node", "1",
            "--save", "run", "--overwrite")  # fmt: skip


def draw(colour: str, shape: str, dice: random.Random) -> Image.Image:

    picture = Image.new("RGB", (32, 32), (235, 235, 235))
    pen, x, y = ImageDraw.Draw(picture), dice.randint(2, 8), dice.randint(2, 8)
    box = (x, y, x + 20, y + 20)
    if shape == "circle":
        pen.ellipse(box, fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle(box, fill=COLOURS[colour])
    else:
        pen.line(box, fill=COLOURS[colour], width=5)
        pen.line((x, y + 20, x + 20, y), fill=COLOURS[colour], width=5)
    return picture


def write_rows(folder: Path) -> None:
    """Rows with one picture, with two, and with none."""
    dice = random.Random(0)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 300), ("validation", 60)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(count):
                shown = 0 if number % 10 == 9 else 2 if number % 3 == 2 else 1
                things = [(dice.choice(list(COLOURS)), dice.choice(SHAPES)) for _ in range(shown)]
                paths = [f"pictures/{split}-{number}-{place}.png" for place in range(shown)]
                for path, thing in zip(paths, things, strict=True):
                    draw(*thing, dice).save(folder / path)
                asked = ["hello there", "<image> what is this ?", "<image> <image> which colours ?"]
                said = ["hello", *[f"a {colour} {shape}" for colour, shape in things[:1]]]
                if shown == 2:
                    said = [f"{things[0][0]} and {things[1][0]}"]
                turns = [{"role": "user", "content": asked[shown]},
                         {"role": "assistant", "content": said[-1]}]  # fmt: skip
                file.write(json.dumps({"messages": turns, "images": paths}) + "\n")


def write_model(folder: Path) -> None:
    """A tokenizer of whole words, and a LLaVA with a tower and a language model of two layers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    words = list(dict.fromkeys([*WORDS, *COLOURS, *SHAPES]))
    backend = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unknown>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    size = {"height": 32, "width": 32}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size), tokenizer, patch_size=8,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )  # fmt: skip
    processor.save_pretrained(folder)
    torch.manual_seed(0)
    layers = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
              "num_attention_heads": 4}  # fmt: skip
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=32, patch_size=8, **layers),
        text_config=LlamaConfig(
            vocab_size=len(tokenizer), max_position_embeddings=128, bos_token_id=None,
            eos_token_id=0, pad_token_id=1, **layers,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"), vision_feature_layer=-1,
    )  # fmt: skip
    LlavaForConditionalGeneration(config).save_pretrained(folder)


def main() -> None:
    given = sys.argv[1:]
    is_named = bool(given) and not given[0].startswith("-")
    folder = Path(given[0] if is_named else "image-text-output")
    write_rows(folder / "data")
    write_model(folder / "model")
    train = ["rapidformer", "--task", "image_text", "--pretrained-model-name-or-path", "model",
             "--data-path", "data", *SETTINGS, *given[is_named:]]  # fmt: skip
    ask = ["rapidformer", "predict", "--load", "run", "--input", "what is this ?",
           "--image", "data/pictures/validation-0-0.png"]  # fmt: skip
    for command in (train, ask):
        print(f"$ cd {folder} && {shlex.join(command)}", flush=True)
        subprocess.run(command, cwd=folder, check=True)


if __name__ == "__main__":
    main()
