"""torchtitan's own trainer on a Llama workload, for ``peers.py``; needs torchtitan 0.2.2.

Its blocks and loss are compiled and nothing is recomputed; on one GPU, torchtitan trains fp32
weights under bf16 autocast. Its Llama has no tied embeddings, so they are tied here, as its own
Qwen3 does it: otherwise it would have more weights than the other runs.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import Transformer, TransformerModelArgs, get_train_spec
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer
from workloads import Rows

NAME = "peer_llama"


@dataclass(frozen=True)
class Measured:
    """What torchtitan's own log says about a run."""

    rate: float
    memory: float
    first_step: float
    loss: float


class TiedTransformer(Transformer):
    def __init__(self, arguments: TransformerModelArgs) -> None:
        super().__init__(arguments)
        self.output.weight = self.tok_embeddings.weight

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        super().init_weights(buffer_device)
        # Moving it off the meta device has separated them.
        self.tok_embeddings.weight = self.output.weight
        nn.init.normal_(self.output.weight, std=0.02)  # as in transformers, to compare losses


class RowSet(torch.utils.data.Dataset[Any]):
    """Rows of one length, labels shifted."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        ids = torch.tensor(self._rows[number]["input_ids"])
        return {"input": ids}, torch.cat([ids[1:], torch.tensor([-100])])


def describe(config: Any) -> TransformerModelArgs:
    """The same sizes in torchtitan's words."""
    return TransformerModelArgs(
        dim=config.hidden_size, n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads, n_kv_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        # The width is rounded up to a multiple, so to the width itself.
        ffn_dim_multiplier=0.5, multiple_of=config.intermediate_size,
    )  # fmt: skip


def run(
    config: Any, rows: Rows, folder: Path, *, batch: int, warm_up: int, log_interval: int,
    workers: int,
) -> Measured:  # fmt: skip
    """Train on all rows; the first ``warm_up`` steps do not count for the rate."""

    def build_loader(dp_world_size: int, dp_rank: int, **_: Any) -> ParallelAwareDataloader:
        return ParallelAwareDataloader(
            RowSet(rows), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=batch,
            num_workers=workers,
        )  # fmt: skip

    spec = replace(
        get_train_spec(), model_cls=TiedTransformer, model_args={"peer": describe(config)},
        build_dataloader_fn=build_loader, build_tokenizer_fn=None, build_validator_fn=None,
        state_dict_adapter=None,
    )  # fmt: skip
    register_train_spec(NAME, spec)
    steps = len(rows) // batch
    arguments = [
        f"--job.dump_folder={folder}", f"--model.name={NAME}", "--model.flavor=peer",
        f"--training.local_batch_size={batch}", f"--training.steps={steps}",
        f"--training.seq_len={len(rows[0]['input_ids'])}", "--training.max_norm=1.0",
        "--optimizer.lr=2e-5", "--lr_scheduler.warmup_steps=0", "--compile.enable",
        "--activation_checkpoint.mode=none", f"--metrics.log_freq={log_interval}",
        "--metrics.enable_tensorboard",
    ]  # fmt: skip
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29519",
    }  # fmt: skip
    began = time.time()
    trainer = Trainer(ConfigManager().parse_args(arguments))
    trainer.train()
    trainer.close()
    return read_log(folder, began, warm_up)


def read_log(folder: Path, began: float, warm_up: int) -> Measured:
    file = next(folder.rglob("events.out.tfevents.*"))
    log = EventAccumulator(str(file))
    log.Reload()
    rates = [event.value for event in log.Scalars("throughput(tps)") if event.step > warm_up]
    losses = log.Scalars("loss_metrics/global_avg_loss")
    return Measured(
        rate=len(rates) / sum(1 / rate for rate in rates),
        memory=max(event.value for event in log.Scalars("memory/max_active(GiB)")),
        first_step=losses[0].wall_time - began,
        loss=losses[-1].value,
    )
