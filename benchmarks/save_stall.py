"""How long a save stops training, and how fast training is while a checkpoint is written.

    python benchmarks/save_stall.py                          # a small llama, on a CPU
    python benchmarks/save_stall.py --size 1b --length 2048  # llama1b with optimizer, on a GPU

Prints one row per way of saving: the stall of the first and of a later save, the seconds until the
checkpoint is complete, and the time of a step while it is written against one without a save.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer.engine import RapidformerEngine

SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 8192,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
}  # fmt: skip

WAYS = {"at once": "off", "background": "on"}


class Measured:
    """An engine that trains on random tokens."""

    def __init__(self, size: str, length: int, async_save: str) -> None:
        is_cuda = torch.cuda.is_available()
        precision = {"mixed_precision": "bf16"} if is_cuda else {}
        self.engine = RapidformerEngine(
            args={"lr": 1e-4, "micro_batch_size": 1, "log_level": "error", "save": "none",
                  "async_save": async_save, **precision}
        )  # fmt: skip
        vocabulary = SIZES[size]["vocab_size"]
        rows = [torch.randint(vocabulary, (length,)).tolist() for _ in range(512)]
        loader = self.engine.data.build_loader(
            [{"input_ids": row, "labels": row} for row in rows], is_training=True
        )
        config = LlamaConfig(**SIZES[size], max_position_embeddings=length)
        with self.engine.device:  # drawing a billion weights takes a CPU minutes
            model = LlamaForCausalLM(config)
        (self.model, *_) = self.engine.compose(model)
        self._updates = self.engine.data.iterate_updates(loader)

    def step(self) -> float:
        """Seconds of one optimizer step."""
        started = time.perf_counter()
        self.engine.run_update(lambda batch: self.model(**batch).loss, next(self._updates))
        self.engine.step()
        self.wait_for_device()
        return time.perf_counter() - started

    def save(self, folder: Path) -> float:
        """Seconds until training may continue."""
        started = time.perf_counter()
        self.engine.save_checkpoint(folder, wait=False)
        self.wait_for_device()
        return time.perf_counter() - started

    def wait_for_device(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def measure(size: str, length: int, steps: int, async_save: str) -> dict[str, Any]:
    run = Measured(size, length, async_save)
    folder = Path(tempfile.mkdtemp(prefix="save-stall-"))
    try:
        run.step()
        run.engine.checkpoints.prepare_saves()  # as the training loop does
        for _ in range(20):  # the first ones are slower
            run.step()
        alone = statistics.median(run.step() for _ in range(steps))
        first = run.save(folder)
        run.engine.checkpoints.wait_for_save()
        run.step()
        started = time.perf_counter()
        later = run.save(folder)
        during = []
        while (
            run.engine.checkpoints.is_saving
            and not run.engine.checkpoints.is_save_written
            and len(during) < 400
        ):
            during.append(run.step())
        run.engine.checkpoints.wait_for_save()
        complete = time.perf_counter() - started
    finally:
        run.engine.close()
        shutil.rmtree(folder)
    # The last step may reach beyond the end of the write.
    slowdown = alone / statistics.median(during) if during else None
    return {"first": first, "later": later, "complete": complete, "speed": slowdown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", choices=WAYS, help="one way of saving (default: both)")
    options = parser.parse_args()
    print("saving      | first stall | later stall | complete after | speed while writing")
    for name, setting in WAYS.items():
        if options.only not in (None, name):
            continue
        found = measure(options.size, options.length, options.steps, setting)
        speed = "-" if found["speed"] is None else f"{found['speed'] * 100:.0f} %"
        print(
            f"{name:<11} | {found['first']:9.2f} s | {found['later']:9.2f} s | "
            f"{found['complete']:12.2f} s | {speed:>19}",
            flush=True,
        )


if __name__ == "__main__":
    main()
