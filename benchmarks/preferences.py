"""Preferences and embeddings: rapidformer against TRL and sentence-transformers.

    python benchmarks/preferences.py [--tiny] [--workloads dpo embeddings] [--runs TRL ...]
        [--steps 20] [--json FILE]

dpo: Llama 1B with LoRA, 8 pairs per step, answers and prompts of 32 to 512 tokens; the reference is
the model without its adapter. TRL computes log-probabilities in chunks by itself (its fused head);
"TRL, fast" also has bf16 weights and recomputes no activations, which are not its defaults.
embeddings: BERT-base, 256 pairs of 8 to 48 tokens per step, in-batch negatives.

Both sides read the same model folder and the same rows in the same order. Each run has its own
process, data loading included, the first steps excluded; padding does not count. bf16 on a GPU,
fp32 on a CPU. A package that is not installed is reported, and its runs are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import (
    COMPILED,
    DEVICE,
    HAS_GPU,
    LIMIT,
    WARM_UP,
    Result,
    Stopwatch,
    call,
    choose_method,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from workloads import LORA_TARGETS, build_word_tokenizer

from rapidformer import RapidformerEngine
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.runner import TaskFinetuner
from rapidformer.training.callbacks import Callback

LORA_RANK = 16
Row = dict[str, str]


@dataclass(frozen=True)
class Work:
    """A workload: its model, its data, and what counts."""

    task: str
    batch: int
    build: Callable[[], Any]
    lengths: tuple[int, int]
    words: int
    unit: str
    goal: str
    settings: dict[str, Any]

    def make_rows(self, count: int) -> list[Row]:
        """Texts of words that are one token each."""
        random = np.random.default_rng(0)

        def write() -> str:
            length = random.integers(self.lengths[0], self.lengths[1] + 1)
            return " ".join(f"w{n}" for n in random.integers(0, self.words - 8, length))

        if self.task == "embedding":
            return [{"anchor": write(), "positive": write()} for _ in range(count)]
        return [
            {"prompt": write(), "chosen": f" {write()}", "rejected": f" {write()}"}
            for _ in range(count)
        ]

    def measure(self, rows: list[Row]) -> int:
        """The units of these rows: pairs, or the tokens of both answers, each after its prompt."""
        if self.unit == "pairs":
            return len(rows)
        sizes = [{name: len(text.split()) for name, text in row.items()} for row in rows]
        return sum(2 * s["prompt"] + s["chosen"] + s["rejected"] + 2 for s in sizes)


def list_works(*, is_tiny: bool) -> dict[str, Work]:
    words = 5000 if is_tiny else 128256
    llama: dict[str, Any] = {
        "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    }  # fmt: skip
    bert: dict[str, Any] = {}
    if is_tiny:
        bert = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
        bert |= {"num_attention_heads": 2}
        llama = {**bert, "num_key_value_heads": 2}

    def build_llama() -> Any:
        limits = {"max_position_embeddings": 4096, "vocab_size": words, "tie_word_embeddings": True}
        config = LlamaConfig(**llama, **limits, pad_token_id=0, eos_token_id=3, bos_token_id=None)
        return LlamaForCausalLM(config)

    lora = {"loss": "sigmoid", "lora_rank": LORA_RANK, "lora_target_modules": [LORA_TARGETS]}
    return {
        "dpo": Work(
            "preference", 2 if is_tiny else 8, build_llama, (4, 16) if is_tiny else (32, 512),
            words, "tokens", "1.5 x TRL, 60 % of its memory", {**lora, "seq_length": 1056},
        ),
        "embeddings": Work(
            "embedding", 8 if is_tiny else 256, lambda: BertModel(BertConfig(**bert)), (8, 48),
            30522, "pairs", "3 x sentence-transformers", {"loss": "infonce", "seq_length": 64},
        ),
    }  # fmt: skip


def write_model(folder: str, workload: str, is_tiny: bool) -> Result:
    """A model with random weights and a tokenizer of whole words; built on the device, since
    initializing a billion weights in host memory takes a minute."""
    work = list_works(is_tiny=is_tiny)[workload]
    with DEVICE:
        model = work.build()
    model.to(torch.bfloat16 if HAS_GPU else torch.float32).save_pretrained(folder)
    tokenizer = build_word_tokenizer(
        work.words - 8, has_frame=work.task == "embedding", length=4096
    )
    tokenizer.save_pretrained(folder)
    return {}


def run_rapidformer(
    work: Work, folder: Path, rows: list[Row], watch: Stopwatch, **more: Any
) -> None:
    class Watch(Callback):
        def on_step_begin(self, *_: Any) -> None:
            watch.begin_step()

    class Bench(TaskFinetuner):
        callbacks = (Watch(),)

    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = {
        "task": work.task, "pretrained_model_name_or_path": str(folder), "train_data": [str(data)],
        "micro_batch_size": work.batch, "epochs": 1, "lr": 1e-5, "log_interval": 50,
        "dataloader_type": "single", "save": "none", "log_level": "error", **work.settings,
    }  # fmt: skip
    settings |= {"mixed_precision": "bf16"} if HAS_GPU else {}
    Bench(RapidformerEngine(args={**settings, **more}), get_task(work.task)).train()


def run_trl(
    work: Work, folder: Path, rows: list[Row], watch: Stopwatch, *, is_fast: bool = False,
    **more: Any,
) -> None:  # fmt: skip
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    class Bench(DPOTrainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            watch.begin_step()
            return super().training_step(*args, **kwargs)

    dtype = torch.bfloat16 if is_fast and HAS_GPU else torch.float32
    if is_fast:
        more["gradient_checkpointing"] = False
    arguments = DPOConfig(
        output_dir=str(folder / "trl"), max_length=1056, **get_common_arguments(work), **more
    )
    Bench(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=LORA_TARGETS),
    ).train()


def run_sentence_transformers(work: Work, folder: Path, rows: list[Row], watch: Stopwatch) -> None:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    class Bench(SentenceTransformerTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            watch.begin_step()
            return super().training_step(*args, **kwargs)

    model = SentenceTransformer(str(folder), device=DEVICE.type, local_files_only=True)
    model.max_seq_length = 64
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "st"), **get_common_arguments(work)
    )
    loss = MultipleNegativesRankingLoss(model)
    Bench(model=model, args=arguments, train_dataset=Dataset.from_list(rows), loss=loss).train()


def get_common_arguments(work: Work) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": work.batch, "num_train_epochs": 1, "learning_rate": 1e-5,
        "bf16": HAS_GPU, "use_cpu": not HAS_GPU, "optim": "adamw_torch_fused", "logging_steps": 50,
        "max_grad_norm": 1.0, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "dataloader_num_workers": 2 if HAS_GPU else 0,
    }  # fmt: skip


Run = Callable[[Work, Path, list[Row], Stopwatch], None]
OURS: dict[str, Run] = {
    "rapidformer": run_rapidformer,
    "rapidformer --compile": lambda *args: run_rapidformer(*args, **COMPILED),
}
RUNS: dict[str, dict[str, Run]] = {
    "dpo": {
        "TRL": run_trl,
        "TRL, fast": lambda *args: run_trl(*args, is_fast=True),
        "TRL, fast + Liger": lambda *args: run_trl(*args, is_fast=True, use_liger_kernel=True),
        **OURS,
        "rapidformer --checkpoint-activations": lambda *args: run_rapidformer(
            *args, checkpoint_activations=True
        ),
    },
    "embeddings": {"sentence-transformers": run_sentence_transformers, **OURS},
}
NEEDED = {
    "TRL": ("trl", "datasets"),
    "TRL, fast": ("trl", "datasets"),
    "TRL, fast + Liger": ("trl", "datasets", "liger_kernel"),
    "sentence-transformers": ("sentence_transformers", "datasets"),
}


def measure(name: str, workload: str, folder: str, steps: int, is_tiny: bool) -> Result:
    work = list_works(is_tiny=is_tiny)[workload]
    rows = work.make_rows(work.batch * (WARM_UP + steps))
    watch = Stopwatch(WARM_UP)
    RUNS[workload][name](work, Path(folder), rows, watch)
    watch.stop()
    memory = torch.cuda.max_memory_allocated() if HAS_GPU else 0
    units = work.measure(rows[WARM_UP * work.batch :])
    return {
        "rate": units / (watch.stopped - watch.started),
        "memory": memory / 2**30,
        "first step": watch.first_step,
    }


def find_problem(name: str) -> str | None:
    missing = [each for each in NEEDED.get(name, ()) if importlib.util.find_spec(each) is None]
    return f"{missing[0]} is not installed" if missing else None


def format_line(name: str, result: Result, base: Result) -> str:
    if "problem" in result:
        return f"| {name} | {result['problem']} | | | |"
    is_compared = "rate" in base
    speed = f"{result['rate'] / base['rate']:.2f} x" if is_compared else ""
    share = f" ({result['memory'] / base['memory']:.0%})" if is_compared and HAS_GPU else ""
    return (
        f"| {name} | {result['rate']:,.0f} | {speed} | {result['memory']:.1f} GiB{share} "
        f"| {result['first step']:.1f} s |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tiny", action="store_true", default=not HAS_GPU, help="to try the script"
    )
    parser.add_argument("--workloads", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--runs", nargs="+", help="those with these names alone")
    parser.add_argument("--steps", type=int, default=20 if HAS_GPU else 3)
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds for one run")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    method, device = choose_method()
    print(f"{device['name']}, torch {torch.__version__}")
    results: dict[str, dict[str, Result]] = {}
    for workload in options.workloads:
        work = list_works(is_tiny=options.tiny)[workload]
        print(f"\n| {workload} (goal: {work.goal}) | {work.unit}/s | speed | memory | first step |"
              "\n|---|---|---|---|---|", flush=True)  # fmt: skip
        results[workload] = {}
        with tempfile.TemporaryDirectory() as folder:
            problem = call(method, LIMIT, write_model, folder, workload, options.tiny)
            if problem:
                sys.exit(f"no model: {problem}")
            for name in RUNS[workload]:
                if options.runs and name not in options.runs:
                    continue
                reason = find_problem(name)
                result = {"problem": reason} if reason else call(
                    method, options.limit, measure, name, workload, folder, options.steps,
                    options.tiny,
                )  # fmt: skip
                results[workload][name] = result
                base = results[workload].get(next(iter(RUNS[workload])), {})
                print(format_line(name, result, base), flush=True)
        if options.json:
            kept = {"device": device, "workloads": results}
            options.json.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
