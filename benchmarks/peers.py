"""Every workload of the docs: rapidformer against Hugging Face's Trainer, TRL, torchtitan, a loop.

    python benchmarks/peers.py [--size tiny] [--workloads gpt2 lora] [--runs rapidformer ...]
        [--steps 30] [--picture FILE] [--json FILE]

Each run has its own process, data loading included, the first steps excluded; padding does not
count. bf16 on a GPU, fp32 on a CPU; fused AdamW and clipping everywhere. rapidformer runs with
its defaults, then with --compile. Prints a table in Markdown, and draws it with --picture. The loss
is the mean over all steps; for torchtitan, which logs single ones, that of the last step.

TRL's SFTTrainer and torchtitan train causal models alone, and need their packages. SFTTrainer
computes log-probabilities in chunks by itself; nothing is recomputed, and on a GPU, Liger's kernels
replace the layers. Its runs "packed" lay rows end to end (best fit decreasing) in packs as long as
the longest row, as many per step as hold the tokens of a batch. Flash attention would take their
boundaries as they are, but it is a package of its own; here transformers computes attention with a
mask of all tokens of a step (SDPA), or a sparse one (flex attention). After training, such a run
checks that no row attends to another one: if it does, it has no figures.

Processes are forked from one that has imported everything, so each starts at once. That one must
never touch the GPU: CUDA does not survive a fork. If it fails in a fork, new processes are started
instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Asking whether there is a GPU must not start CUDA; see above.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import accelerate
import peft  # noqa: F401  imported for the forks
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainerCallback
from workloads import (
    LORA_TARGETS,
    Rows,
    Workload,
    add_lora,
    build_word_tokenizer,
    list_workloads,
)

import rapidformer
from rapidformer import Finetuner, RapidformerEngine
from rapidformer.data.collate import PadCollator
from rapidformer.dist.matrix_rate import measure_matrix_rate
from rapidformer.models.work import count_work
from rapidformer.training.callbacks import Callback

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
WARM_UP = 12 if HAS_GPU else 2
COMPILED: dict[str, Any] = {"compile": True, "compile_backend": "inductor"}
"""The backend is named, since ``auto`` compiles nothing on a CPU."""
LIMIT = 400
"""Seconds for one run."""

Result = dict[str, Any]
"""Figures, or a ``problem``."""


class Stopwatch:
    """Starts after the warm-up steps; waits for the device at both ends."""

    def __init__(self, warm_up: int, take_turn: Callable[[], object] = lambda: None) -> None:
        """``take_turn`` is called between the warm-up and the timed steps."""
        self._warm_up, self._take_turn = warm_up, take_turn
        self._steps = 0
        self._began = time.perf_counter()
        self.first_step = self.started = self.stopped = 0.0
        self._losses: list[tuple[float, int]] = []
        self.tokens = 0
        """Of the timed steps, if their batches are not those of the rows."""
        self.memory: float | None = None
        """The peak in GiB, if the run measures it itself."""

    def restart(self) -> None:
        """Now, after a peer's imports; those of the others came before the run."""
        self._began = time.perf_counter()

    def begin_step(self, tokens: int = 0) -> None:
        """Call before the forward pass of each step."""
        if self._steps in (1, self._warm_up):
            wait()
        if self._steps == 1:
            self.first_step = time.perf_counter() - self._began
        if self._steps == self._warm_up:
            self._take_turn()
            self.started = time.perf_counter()
        if self._steps >= self._warm_up:
            self.tokens += tokens
        self._steps += 1

    @property
    def warm_up(self) -> int:
        return self._warm_up

    def note_loss(self, mean: float, step: int) -> None:
        """The mean loss since the last call."""
        self._losses.append((mean, step))

    @property
    def loss(self) -> float:
        """The mean over all steps."""
        steps = [0, *(step for _, step in self._losses)]
        total = sum(mean * (step - steps[n]) for n, (mean, step) in enumerate(self._losses))
        return total / steps[-1] if steps[-1] else math.nan

    def stop(self) -> None:
        """The first call counts."""
        if not self.stopped:
            wait()
            self.stopped = time.perf_counter()

    def accept(self, *, seconds: float, memory: float, first_step: float, loss: float) -> None:
        """The figures of a run that has measured itself; ``seconds`` for the timed steps."""
        self.started, self.stopped = 0.0, seconds
        self.memory, self.first_step, self._losses = memory, first_step, [(loss, 1)]


def wait() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def build_model(work: Workload, device: torch.device = DEVICE) -> nn.Module:
    """Created on the device: initializing a billion weights in host memory takes a minute."""
    torch.manual_seed(0)
    with device:
        return add_lora(work.build(), work.lora_rank)


def run_rapidformer(work: Workload, rows: Rows, watch: Stopwatch, **more: Any) -> None:
    class Watch(Callback):
        # Not in the forward step: a CUDA graph replays a step without its Python code.
        def on_step_begin(self, *_: Any) -> None:
            watch.begin_step()

        def on_log(self, loop: Any, control: Any, line: dict[str, Any]) -> None:
            if "loss" in line:
                watch.note_loss(line["loss"], loop.step)

    class Bench(Finetuner):
        callbacks = (Watch(),)

        def train_valid_test_datasets_provider(self) -> Any:
            return rows, None, None, None

        def model_optimizer_lr_scheduler_provider(self) -> Any:
            return build_model(replace(work, lora_rank=None)), None, None

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            return model(**batch).loss

    settings: dict[str, Any] = {
        "micro_batch_size": work.batch, "epochs": 1, "lr": 2e-5, "dataloader_type": "single",
        "log_interval": len(rows) // work.batch, "save": "none",
    }  # fmt: skip
    settings |= {"mixed_precision": "bf16"} if HAS_GPU else {}
    if work.lora_rank:
        settings |= {"lora_rank": work.lora_rank, "lora_target_modules": [LORA_TARGETS]}
    Bench(RapidformerEngine(args={**settings, **more})).train()


def watch_trainer(base: type[Trainer], watch: Stopwatch, *, counts: bool = False) -> type[Trainer]:
    """A Trainer that takes the rows in their order; ``counts`` the tokens of each batch."""

    class Watch(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.begin_step()

    class Bench(base):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(callbacks=[] if counts else [Watch()], **arguments)

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "train_loss" in logs:
                watch.note_loss(logs["train_loss"], self.state.global_step)
            super().log(logs, *args, **kwargs)

    class Counting(Bench):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            watch.begin_step(inputs["input_ids"].numel())
            return super().training_step(model, inputs, *args, **kwargs)

    return Counting if counts else Bench


def get_trainer_arguments(folder: str, batch: int) -> dict[str, Any]:
    return {
        "output_dir": folder, "per_device_train_batch_size": batch, "num_train_epochs": 1,
        "learning_rate": 2e-5, "bf16": HAS_GPU, "use_cpu": not HAS_GPU,
        "optim": "adamw_torch_fused", "max_grad_norm": 1.0, "logging_strategy": "no",
        "save_strategy": "no", "report_to": [], "dataloader_num_workers": 2 if HAS_GPU else 0,
        "disable_tqdm": True,
    }  # fmt: skip


def run_trainer(
    work: Workload, rows: Rows, watch: Stopwatch, *, package: Any = transformers, **more: Any
) -> None:
    """The same script, with the ``Trainer`` of ``package``."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = package.TrainingArguments(**get_trainer_arguments(folder, work.batch), **more)
        watch_trainer(package.Trainer, watch)(
            model=build_model(work), args=arguments, train_dataset=rows, data_collator=PadCollator()
        ).train()


def run_accelerate(
    work: Workload, rows: Rows, watch: Stopwatch, *, package: Any = accelerate, **more: Any
) -> None:
    """The loop of Accelerate's examples, with the ``Accelerator`` of ``package``."""
    accelerator = package.Accelerator(mixed_precision="bf16" if HAS_GPU else "no", **more)
    model = build_model(work)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    loader = torch.utils.data.DataLoader(
        rows, batch_size=work.batch, collate_fn=PadCollator(),
        num_workers=2 if HAS_GPU else 0, pin_memory=HAS_GPU,
    )  # fmt: skip
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    total = torch.zeros((), device=DEVICE)
    for batch in loader:
        watch.begin_step()
        loss = model(**batch).loss
        total += loss.detach()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    watch.note_loss(total.item() / len(loader), len(loader))


def run_trl(
    work: Workload, rows: Rows, watch: Stopwatch, *, attention: str = "sdpa", packs: bool = False
) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    watch.restart()
    sizes = [len(row["input_ids"]) for row in rows]
    longest = max(sizes)
    batch = max(round(sum(sizes) * work.batch / len(rows) / longest), 1) if packs else work.batch
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            **get_trainer_arguments(folder, batch), packing=packs, packing_strategy="bfd",
            max_length=longest, shuffle_dataset=False, gradient_checkpointing=False,
            use_liger_kernel=HAS_GPU,
        )  # fmt: skip
        model: Any = build_model(work)
        model.set_attn_implementation(attention)
        run = watch_trainer(SFTTrainer, watch, counts=packs)(
            model=model, args=arguments, train_dataset=Dataset.from_list(rows),
            processing_class=build_word_tokenizer(8, has_frame=False, length=longest),
        )  # fmt: skip
        run.train()
        watch.stop()
        if packs:
            check_packs(model, run.data_collator)


def check_packs(model: Any, collate: Callable[..., Any]) -> None:
    """Raises if other tokens in the first row of a pack change what the second one becomes."""

    def compute(first: range) -> torch.Tensor:
        ids = [*first, *range(20, 60)]
        batch = collate([{"input_ids": ids, "labels": ids, "seq_lengths": [len(first), 40]}])
        batch.pop("labels")
        inputs = {n: v.to(DEVICE) if torch.is_tensor(v) else v for n, v in batch.items()}
        with torch.no_grad(), torch.autocast(DEVICE.type, DTYPE, enabled=HAS_GPU):
            hidden: torch.Tensor = model.model(**inputs).last_hidden_state
        return hidden[:, len(first) :]

    if not torch.equal(compute(range(100, 150)), compute(range(200, 250))):
        raise RuntimeError("rows of a pack attend to each other")


def run_torchtitan(work: Workload, rows: Rows, watch: Stopwatch) -> None:
    import torchtitan_llama

    model: Any = build_model(work, torch.device("meta"))
    steps, timed = len(rows) // work.batch, rows[watch.warm_up * work.batch :]
    with tempfile.TemporaryDirectory() as folder:
        measured = torchtitan_llama.run(
            model.config, rows, Path(folder), batch=work.batch, warm_up=watch.warm_up,
            log_interval=math.gcd(watch.warm_up, steps), workers=2 if HAS_GPU else 0,
        )  # fmt: skip
    seconds = sum(len(row["input_ids"]) for row in timed) / measured.rate
    watch.accept(
        seconds=seconds, memory=measured.memory, first_step=measured.first_step, loss=measured.loss
    )


def run_plain_loop(work: Workload, rows: Rows, watch: Stopwatch) -> None:
    """What a careful engineer writes by hand, compiled as a whole."""
    model = build_model(work)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-5, fused=True)
    compiled = torch.compile(model)
    loader = torch.utils.data.DataLoader(
        rows, batch_size=work.batch, collate_fn=PadCollator(),
        num_workers=2 if HAS_GPU else 0, pin_memory=HAS_GPU,
    )  # fmt: skip
    total = torch.zeros((), device=DEVICE)
    for batch in loader:
        watch.begin_step()
        batch = {name: value.to(DEVICE, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=HAS_GPU):
            loss = compiled(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
    watch.note_loss(total.item() / len(loader), len(loader))


Run = Callable[[Workload, Rows, Stopwatch], None]
RUNS: dict[str, Run] = {
    "HF Trainer": run_trainer,
    "HF Trainer + compile": lambda *args: run_trainer(*args, torch_compile=True),
    "HF Trainer + Liger": lambda *args: run_trainer(*args, use_liger_kernel=True),
    "HF Trainer + Liger + compile": lambda *args: run_trainer(
        *args, use_liger_kernel=True, torch_compile=True
    ),
    "TRL": run_trl,
    "TRL, packed": lambda *args: run_trl(*args, packs=True),
    "TRL, packed, flex": lambda *args: run_trl(*args, packs=True, attention="flex_attention"),
    "torchtitan": run_torchtitan,
    "plain loop + compile": run_plain_loop,
    "rapidformer": run_rapidformer,
    "rapidformer, padded": lambda *args: run_rapidformer(*args, dynamic_shape="off"),
    "rapidformer --compile": lambda *args: run_rapidformer(*args, **COMPILED),
    "rapidformer --compile --fp8": lambda *args: run_rapidformer(*args, **COMPILED, fp8=True),
    "rapidformer.Trainer": lambda *args: run_trainer(*args, package=rapidformer),
    "rapidformer.Trainer, compiled": lambda *args: run_trainer(
        *args, package=rapidformer, torch_compile=True
    ),
    "Accelerate": run_accelerate,
    "rapidformer.Accelerator": lambda *args: run_accelerate(*args, package=rapidformer),
}


OPTIONAL = (
    "rapidformer, padded", "rapidformer.Trainer", "rapidformer.Trainer, compiled", "Accelerate",
    "rapidformer.Accelerator",
)  # fmt: skip
"""Runs that are only made if they are asked for."""
ONLY_FOR = {
    "HF Trainer + Liger": ("llama1b", "lora"),
    "HF Trainer + Liger + compile": ("llama1b",),
    "TRL": ("llama1b",),
    "TRL, packed": (),  # all rows are of one length here: ``held.py`` has others
    "TRL, packed, flex": (),
    "torchtitan": ("llama1b",),
    "rapidformer --compile --fp8": ("llama1b",),
}
"""Runs that are made for these workloads alone."""
NEEDED = {
    "HF Trainer + Liger": ("liger_kernel",),
    "HF Trainer + Liger + compile": ("liger_kernel",),
    "TRL": ("trl", "datasets", "liger_kernel"),
    "TRL, packed": ("trl", "datasets", "liger_kernel"),
    "TRL, packed, flex": ("trl", "datasets", "liger_kernel"),
    "torchtitan": ("torchtitan", "torchdata", "datasets"),
}
"""The packages of a run."""


def measure(name: str, workload: str, size: str, steps: int, matrix_rate: float | None) -> Result:
    work = list_workloads(size)[workload]
    warm_up = WARM_UP * work.repeats
    rows = work.make_rows(work.batch * (warm_up + steps * work.repeats))
    timed = rows[warm_up * work.batch :]
    targets = sum(len(row["labels"]) for row in timed) if work.unit == "samples" else 0
    watch = Stopwatch(warm_up)
    RUNS[name](work, rows, watch)
    watch.stop()
    tokens = watch.tokens or sum(len(row["input_ids"]) for row in timed)
    seconds = watch.stopped - watch.started
    counted = count_work(build_model(work, torch.device("meta")))
    operations = counted.count(tokens=tokens, targets=targets, rows=len(timed))
    return {
        "rate": (len(timed) if work.unit == "samples" else tokens) / seconds,
        "mfu": operations / seconds / matrix_rate if matrix_rate else None,
        "memory": get_peak(watch),
        "first step": watch.first_step,
        "loss": watch.loss,
    }


def get_peak(watch: Stopwatch) -> float:
    """GiB."""
    if watch.memory is not None:
        return watch.memory
    return torch.cuda.max_memory_allocated() / 2**30 if HAS_GPU else 0.0


def describe_device() -> Result:
    name = torch.cuda.get_device_name() if HAS_GPU else "CPU"
    rate = measure_matrix_rate(DEVICE, DTYPE) if HAS_GPU else None
    return {"name": name, "matrix rate": rate}


def choose_method() -> tuple[str, Result]:
    """How processes are started that can use the device, and what it is."""
    method, device = "fork", call("fork", LIMIT, describe_device)
    if "problem" in device:
        print(f"forks cannot use the device: {device['problem']}")
        method, device = "spawn", call("spawn", LIMIT, describe_device)
    if "problem" in device:
        sys.exit(f"the device cannot be used: {device['problem']}")
    return method, device


def find_problem(name: str) -> str | None:
    """Why a run cannot work here; found without starting it."""
    missing = [each for each in NEEDED.get(name, ()) if importlib.util.find_spec(each) is None]
    return f"{missing[0]} is not installed" if missing else None


def load_results(path: Path | None, device: Result, size: str) -> dict[str, dict[str, Result]]:
    """Those of earlier calls, without the runs that failed.

    Exits if they are from another kind of device or another size of models.
    """
    if not path or not path.exists():
        return {}
    kept = json.loads(path.read_text())
    there, here = (kept["device"]["name"], kept.get("size", size)), (device["name"], size)
    if there != here:
        sys.exit(
            f"{path} holds figures of {there[0]}, size {there[1]}; this is {here[0]}, size "
            f"{here[1]}. Choose another file."
        )
    return {
        workload: {name: result for name, result in runs.items() if "problem" not in result}
        for workload, runs in kept["workloads"].items()
    }


def call(method: str, limit: float | None, function: Callable[..., Result], *args: Any) -> Result:
    """In a new process; an error, a crash or more than ``limit`` seconds is a result as well."""
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            return {"problem": f"not done after {limit:.0f} s"}
        return dict(receiver.recv())
    except EOFError:
        process.join()
        return {"problem": f"crashed with status {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _answer(sender: Connection, function: Callable[..., Result], args: Any) -> None:
    # What libraries print would break the table.
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(silence, stream.fileno())
    try:
        sender.send(function(*args))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        sender.send({"problem": text[:80].replace("|", "/")})


def format_line(name: str, result: dict[str, Any], base: float | None) -> str:
    if "problem" in result:
        return f"| {name} | {result['problem']} | | | | | |"
    rate = result["rate"]
    shown = f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.1f}"
    ratio = f"{rate / base:.2f} x" if base else ""
    mfu = "" if result["mfu"] is None else f"{result['mfu']:.1%}"
    return (
        f"| {name} | {shown} | {ratio} | {mfu} | {result['memory']:.1f} GiB "
        f"| {result['first step']:.1f} s | {result.get('loss', math.nan):.3f} |"
    )


COLORS = {
    "HF Trainer": "0.8",
    "HF Trainer + compile": "0.65",
    "HF Trainer + Liger": "0.5",
    "plain loop + compile": "0.3",
    "rapidformer": "tab:blue",
    "rapidformer, padded": "tab:cyan",
    "rapidformer --compile": "tab:orange",
    "rapidformer --compile --fp8": "tab:green",
}


def draw(results: dict[str, dict[str, Result]], path: Path) -> None:
    """Bars relative to Hugging Face's Trainer, one group per workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.5))
    width = 0.15
    for place, runs in enumerate(results.values()):
        base = runs.get("HF Trainer", {}).get("rate")
        shown = [name for name in COLORS if base and "rate" in runs.get(name, {})]
        for number, name in enumerate(shown):
            left = place + (number - len(shown) / 2 + 0.5) * width
            ratio = runs[name]["rate"] / base
            bars = axes.bar(left, ratio, 0.9 * width, color=COLORS[name], label=name)
            axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(results)), list(results))
    axes.set_ylabel("speed relative to HF Trainer")
    axes.axhline(1, color="grey", linewidth=0.8)
    handles, labels = axes.get_legend_handles_labels()
    legend = dict(zip(labels, handles, strict=True))
    found = [name for name in COLORS if name in legend]
    axes.legend([legend[name] for name in found], found, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = ("full", "medium", "tiny")
    parser.add_argument("--size", choices=sizes, default="full" if HAS_GPU else "tiny")
    parser.add_argument("--workloads", nargs="+", choices=list_workloads("tiny"))
    usual = [name for name in RUNS if name not in OPTIONAL]
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=usual)
    parser.add_argument("--steps", type=int, default=30 if HAS_GPU else 3)
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds for one run")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", type=Path, help="keep the figures there; what it has is not run")
    options = parser.parse_args()
    workloads = list_workloads(options.size)
    method, device = choose_method()
    rate = device["matrix rate"]
    speed = f"{rate / 1e12:.1f} TFLOP/s in " if rate else ""
    print(f"{device['name']}, torch {torch.__version__}, {speed}{DTYPE}")
    results = load_results(options.json, device, options.size)
    for workload in options.workloads or workloads:
        work = workloads[workload]
        print(f"\n| {workload} (goal: {work.goal or '-'}) | {work.unit}/s | speed | MFU "
              f"| memory | first step | loss |\n|{'---|' * 7}", flush=True)  # fmt: skip
        runs = results.setdefault(workload, {})
        for name in options.runs:
            if workload not in ONLY_FOR.get(name, (workload,)):
                continue
            result = runs.get(name)
            if result is None:
                problem = find_problem(name)
                result = {"problem": problem} if problem else call(
                    method, options.limit, measure, name, workload, options.size, options.steps,
                    rate,
                )  # fmt: skip
                runs[name] = result
            base = runs.get("HF Trainer", {}).get("rate")
            print(format_line(name, result, base), flush=True)
            if options.json:
                kept = {"device": device, "size": options.size, "workloads": results}
                options.json.write_text(json.dumps(kept, indent=2) + "\n")
    if options.picture:
        draw(results, options.picture)


if __name__ == "__main__":
    main()
