"""The documents' scripts and commands on 1, 2 and 4 processes, with small models and data.

They are those of ``tests/dialects/scripts`` and ``examples``: only import lines, paths and the
widths of layouts are changed. A table says how each of them ended.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from transformers import BertConfig, BertForPreTraining

from tests.dialects.test_flagai import CONSTRUCTOR, LAUNCH
from tests.dialects.test_flagai import SCRIPT as FLAGAI_SCRIPT
from tests.dialects.test_flagai import fill as fill_flagai
from tests.dialects.test_mindformers import SCRIPTS
from tests.dialects.test_mindformers import fill as fill_mindformers
from tests.processes import find_free_port
from tests.small import make_model_folder, make_pair_data
from tests.tasks.pretraining.corpus import BERT_SPECIAL, WORDS, write_bert_corpus, write_gpt_corpus
from tests.warm_python import get_warm_python

EXAMPLES = Path(__file__).parents[2] / "examples"
COUNTS = (1, 2, 4)
SECONDS = 500
Build = Callable[[int, Path], list[object]]
"""From the number of processes and the folder that a script runs in to its command line."""


def build_place(folder: Path) -> None:
    """Everything that any of the scripts looks for."""
    folder.mkdir(parents=True)
    fill_flagai(folder)
    fill_mindformers(folder)
    for name in ("model", "bert"):
        make_model_folder(folder / name)
    for name in ("data", "mrpc"):
        make_pair_data(folder / name, train=48, validation=12, words=6)
    (folder / "corpus").mkdir()
    write_bert_corpus(folder / "corpus")
    write_gpt_corpus(folder / "corpus")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=len(BERT_SPECIAL + WORDS), intermediate_size=64, max_position_embeddings=24,
        **sizes,
    )  # fmt: skip
    BertForPreTraining(config).save_pretrained(folder / "pretrained")


def command(count: int, *words: object) -> list[object]:
    return ["-m", "rapidformer.cli.main", *words, "--nproc-per-node", count, "--device", "cpu"]


def launch(count: int, script: object, *words: object) -> list[object]:
    return [*command(count, "launch"), script, *words]


# ---- Rapidformer's own documents -----------------------------------------------------------------

FINETUNING = [
    "--pretrained-model-name-or-path", "model", "--data-path", "data", "--epochs", 2,
    "--micro-batch-size", 4, "--lr", 2e-5, "--lr-decay-style", "linear", "--lr-warmup-iters", 10,
    "--weight-decay", 1e-2, "--clip-grad", 1.0, "--compile-backend", "eager", "--save", "run",
]  # fmt: skip
SIZES = [
    "--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 2, "--seq-length", 24,
    "--max-position-embeddings", 24, "--micro-batch-size", 2, "--global-batch-size", 8,
    "--train-iters", 3, "--data-impl", "mmap", "--split", "80,20", "--lr", 1e-3,
    "--lr-decay-style", "linear", "--weight-decay", 1e-2, "--clip-grad", 1.0,
    "--lr-warmup-fraction", 0.01, "--eval-iters", 1, "--compile-backend", "eager", "--save", "run",
]  # fmt: skip
BERT = [
    "--data-path", "corpus/bert_text_sentence", "--tokenizer-type", "BertWordPieceLowerCase",
    "--vocab-file", "corpus/vocab.txt", "--pretrained-model-name-or-path", "pretrained",
]  # fmt: skip
GPT = [
    "--data-path", "corpus/gpt_text_document", "--tokenizer-type", "GPT2BPETokenizer",
    "--vocab-file", "corpus/gpt2-vocab.json", "--merge-file", "corpus/gpt2-merges.txt",
]  # fmt: skip


def script(name: str, *switches: object) -> Build:
    return lambda count, _: command(
        count, "--user-script", EXAMPLES / name, *FINETUNING, *(f"--{s}" for s in switches)
    )


def pretrain_gpt(count: int, _: Path) -> list[object]:
    widths = ["--tensor-model-parallel-size", min(count, 2)]
    widths += ["--pipeline-model-parallel-size", max(count // 2, 1)]
    switches = ["--zero-2-memory-optimization", "--checkpoint-activations", "--mixed-precision"]
    words = ["--user-script", EXAMPLES / "pretraining" / "gpt.py", *SIZES, *GPT]
    return command(count, *words, *widths, *switches)


# ---- FlagAI --------------------------------------------------------------------------------------

_DEEPSPEED = "    deepspeed_config='deepspeed.json',\n"


def flagai(env_type: str, more: str = "", *, is_alone: bool = False) -> Build:
    """The document's T5 script with another of its constructors; it starts its processes itself."""

    def build(count: int, folder: Path) -> list[object]:
        text = LAUNCH.format(processes=count).replace("17750", str(find_free_port()))
        extra = more.replace("WIDTH", str(min(count, 2)))
        made = CONSTRUCTOR.format(
            env_type=env_type, batch=2, launch="" if is_alone else text, more=extra
        )
        source = FLAGAI_SCRIPT.read_text("utf-8")
        changed = re.sub(r"trainer = MyTrainer\(.*?\n    fp16=False\)\n", made, source, flags=re.S)
        (folder / "train.py").write_text(changed, encoding="utf-8")
        return launch(count, "train.py") if is_alone else ["train.py"]

    return build


# ---- Hugging Face, Accelerate, MindFormers -------------------------------------------------------


def copied(name: str) -> Build:
    return lambda count, _: launch(count, SCRIPTS / name)


def accelerate_with_deepspeed(count: int, folder: Path) -> list[object]:
    """The script with the document's plugin; the processor has no fp16 to train in."""
    source = (SCRIPTS / "accelerate_distribution2.py").read_text("utf-8")
    plugin = (
        "from rapidformer import DeepSpeedPlugin\n"
        "deepspeed_plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2)\n"
        "accelerator = Accelerator(deepspeed_plugin=deepspeed_plugin)\n"
    )
    (folder / "plugin.py").write_text(source.replace("accelerator = Accelerator()\n", plugin))
    return launch(count, "plugin.py")


def mindformers(name: str, mode: str, *words: object, splits: bool = False) -> Build:
    def build(count: int, _: Path) -> list[object]:
        widths: list[object] = []
        if splits:
            stages = 1 if mode == "predict" else max(count // 2, 1)
            widths += ["--data_parallel", 1, "--model_parallel", min(count, 2)]
            widths += ["--pipeline_parallel", stages, "--micro_size", 2] if stages > 1 else []
        common = ["--task", "text_generation", "--model_type", "gpt2", "--run_mode", mode]
        return launch(count, SCRIPTS / name, *common, *words, *widths)

    return build


TRAIN, EVAL, ASK = (
    ["--train_dataset", "./train"], ["--eval_dataset", "./eval"], ["--predict_data", "hello!"]
)  # fmt: skip
LORA = ["--pet_method", "lora"]
CASES: dict[str, Build] = {
    "engine loop": script("engine_loop.py", "mixed-precision"),
    "black box fine-tuning": lambda count, _: command(
        count, "--task", "sequence_classification", *FINETUNING, "--mixed-precision",
        "--onnx-runtime-training", "--zero-1-memory-optimization",
    ),
    "black box pre-training": lambda count, _: command(
        count, "--task", "pretraining", *SIZES, *BERT, "--mixed-precision",
        "--onnx-runtime-training", "--fsdp-memory-optimization",
    ),
    "Finetuner": script(
        "finetuner.py", "mixed-precision", "zero-3-memory-optimization", "onnx-runtime-training"
    ),
    "PreTrainer, BERT": lambda count, _: command(
        count, "--user-script", EXAMPLES / "pretraining" / "bert.py", *SIZES, *BERT,
        "--zero-3-memory-optimization", "--onnx-runtime-training", "--mixed-precision",
    ),
    "custom loop": script("custom_loop.py", "zero-1-memory-optimization"),
    "PreTrainer, GPT, tensor x pipeline": pretrain_gpt,
    "FlagAI pytorch": flagai("pytorch", is_alone=True),
    "FlagAI pytorch, recomputing": flagai(
        "pytorch", "    checkpoint_activations=True,\n", is_alone=True
    ),
    "FlagAI pytorchDDP": flagai("pytorchDDP"),
    "FlagAI pytorchDDP with deepspeed_config": flagai("pytorchDDP", _DEEPSPEED),
    "FlagAI deepspeed": flagai("deepspeed", _DEEPSPEED),
    "FlagAI deepspeed+mpu": flagai(
        "deepspeed+mpu", _DEEPSPEED + "    model_paralle_size = WIDTH\n"
    ),
    "Hugging Face Trainer": copied("hugging_face_trainer.py"),
    "PyTorch style": copied("pytorch_style.py"),
    "Accelerate distribution2": copied("accelerate_distribution2.py"),
    "Accelerate with DeepSpeedPlugin": accelerate_with_deepspeed,
    **{
        f"MindFormers {name} {mode}{' lora' * (LORA[0] in words)}": mindformers(
            f"{name}_task.py", mode, *words, splits=name == "distribute"
        )
        for name in ("standalone", "distribute")
        for mode, words in (
            ("train", TRAIN), ("eval", EVAL), ("finetune", TRAIN + LORA), ("predict", ASK),
            ("predict", ASK + LORA),
        )
    },
}  # fmt: skip


def main(words: list[str]) -> int:
    folder, *parts = Path(words[0]).resolve(), *words[1:]
    build_place(folder / "place")
    python = get_warm_python()
    variables = {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder / "cache"),
        "RAPIDFORMER_EMULATE_16_BIT": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    status = 0
    for name, build in CASES.items():
        if parts and not any(part in name for part in parts):
            continue
        ends = []
        for count in COUNTS:
            place = folder / f"{name} on {count}"
            shutil.copytree(folder / "place", place)
            line = [str(python), *map(str, build(count, place))]
            started = time.monotonic()
            with (place / "printed.txt").open("w") as output:
                done = subprocess.run(
                    line, cwd=place, stdout=output, stderr=subprocess.STDOUT, env=variables,
                    timeout=SECONDS, check=False,
                )  # fmt: skip
            status |= done.returncode
            ends.append(f"{done.returncode} ({time.monotonic() - started:.0f} s)")
        print(f"{name:44} {'  '.join(f'{end:10}' for end in ends)}", flush=True)
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
