"""Learn a preference on a CPU in half a minute: kind answers are better than rude ones.

Writes pairs and a tiny model with random weights, and trains it with the command that is printed.
SimPO needs no reference, so the accuracy on pairs that were held out begins at chance, 50 %. (With
a reference, as in DPO, it begins at 0: before the first step, no answer is any more likely than in
the reference.)

    python examples/preference.py [FOLDER] [--loss sigmoid ...]
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
from pathlib import Path

KIND = ["please", "thanks", "gladly", "welcome", "sorry"]
RUDE = ["no", "whatever", "boring", "silly", "never"]
OTHER = ["the", "sky", "sea", "is", "blue", "green", "and", "I", "you", "we", "see", "it", "."]
ASKED = ["what", "who", "where", "how", "?"]
SHAPE = ("--seq-length", "32", "--nproc-per-node", "1", "--save", "run", "--overwrite")
TRAINING = ("--epochs", "1", "--micro-batch-size", "16", "--lr", "3e-3", "--log-interval", "5",
            "--eval-on-start", "--metric-for-best-model", "rewards/accuracies")  # fmt: skip


def write_pairs(folder: Path) -> None:
    """Both answers say the same, each with two words of its own kind."""
    dice = random.Random(0)

    def mix(said: list[str], tone: list[str]) -> str:
        words = [*said, *dice.sample(tone, 2)]
        dice.shuffle(words)
        return "".join(f" {word}" for word in words)

    for split, count in (("train", 320), ("validation", 100)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(count):
                prompt = " ".join(dice.choices(ASKED + OTHER, k=dice.randint(2, 6)))
                said = dice.choices(OTHER, k=dice.randint(2, 6))
                row = {"prompt": prompt, "chosen": mix(said, KIND), "rejected": mix(said, RUDE)}
                file.write(json.dumps(row) + "\n")


def write_model(folder: Path) -> None:
    """A tokenizer of whole words, and a Llama of two small layers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<end>", "<pad>", "<unknown>", *KIND, *RUDE, *OTHER, *ASKED]
    backend = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unknown>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", model_max_length=64
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    given = sys.argv[1:]
    is_named = bool(given) and not given[0].startswith("-")
    folder = Path(given[0] if is_named else "preference-output")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    write_pairs(folder / "data")
    write_model(folder / "model")
    command = [
        "rapidformer", "--task", "preference", "--loss", "simpo",
        "--pretrained-model-name-or-path", "model", "--data-path", "data", *SHAPE, *TRAINING,
        *given[is_named:],
    ]  # fmt: skip
    print(f"$ cd {folder} && {shlex.join(command)}", flush=True)
    subprocess.run(command, cwd=folder, check=True)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open(encoding="utf-8")]
    found = [line["eval_rewards/accuracies"] for line in lines if "eval_rewards/accuracies" in line]
    print(f"accuracy on pairs held out: {found[0]:.0%} before training, {found[-1]:.0%} after it")


if __name__ == "__main__":
    main()
