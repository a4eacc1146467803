"""The part of ``Accelerator`` that saves and loads: weights, and the state of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from rapidformer.data.loader import DistributedLoader
from rapidformer.dialects.accelerate.processes import ProcessVerbs
from rapidformer.errors import RapidformerError
from rapidformer.log import warn_once
from rapidformer.overlay import extend, list_layers


class SavingVerbs(ProcessVerbs):
    """What is written to disk and read from it."""

    _schedulers: list[LRScheduler]
    _registered: list[Any]
    """What the script saves with the state."""

    def unwrap_model(self, model: nn.Module, **options: Any) -> nn.Module:
        """The model: nothing is ever wrapped. Of a sharded one, every process must save."""
        is_sharded = any(isinstance(weight, DTensor) for weight in self.engine.model.parameters)
        if model is self.engine.model.module and is_sharded and "saving" not in list_layers(model):
            extend(model, "saving", self._build_saving)
        return model

    def _build_saving(self, cls: Any) -> dict[str, Any]:
        def save_pretrained(
            module: nn.Module, save_directory: str | Path, *values: Any, **options: Any
        ) -> None:
            if options.get("state_dict") is not None:  # gathered already
                cls.save_pretrained(module, save_directory, *values, **options)
            else:
                self.engine.checkpoints.export_into(save_directory)

        return {"save_pretrained": save_pretrained} if hasattr(cls, "save_pretrained") else {}

    def get_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The weights whole, on the first process; every process must call this."""
        return self.engine.checkpoints.gather_weights()

    def save_model(
        self, model: nn.Module, save_directory: str | Path, *sizes: Any, **options: Any
    ) -> None:
        """Write the weights whole, as a folder that ``from_pretrained`` loads."""
        if sizes or options:
            warn_once("save_model(): max_shard_size and safe_serialization have no effect.")
        self.engine.checkpoints.export_into(save_directory)

    def save(self, content: Any, file: str | Path, **options: Any) -> None:
        """``torch.save``, once."""
        if self.is_main_process:
            torch.save(content, file)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these with the state; their ``state_dict()`` must be plain numbers."""
        self._registered += objects

    def save_state(self, output_dir: str | Path | None = None, **options: Any) -> str:
        """Save model, optimizer, prepared schedulers, random states and data position."""
        if output_dir is None:
            raise RapidformerError("save_state() needs a folder: save_state(output_dir).")
        extra = {
            "rates": [float(group["lr"]) for group in self._get_groups()],
            "schedulers": list(map(_get_plain_state, self._schedulers)),
            "registered": list(map(_get_plain_state, self._registered)),
        }
        return str(self.engine.save_checkpoint(output_dir, extra))

    def load_state(self, input_dir: str | Path | None = None, **options: Any) -> None:
        """Resume from ``save_state``; the loader restarts the epoch (``skip_first_batches``)."""
        if input_dir is None:
            raise RapidformerError("load_state() needs a folder: load_state(input_dir).")
        extra = self.engine.load_checkpoint(input_dir)
        for kind, objects in (("schedulers", self._schedulers), ("registered", self._registered)):
            for holder, state in zip(objects, extra.get(kind, []), strict=True):
                holder.load_state_dict(state)
        for group, rate in zip(self._get_groups(), extra.get("rates", []), strict=False):
            group["lr"] = rate
        loader = self.engine.data.train_loader
        if loader is not None:
            loader.load_state_dict({"epoch": loader.epoch, "consumed_samples": 0})

    def _get_groups(self) -> list[dict[str, Any]]:
        optimizer = self.engine.updates.optimizer
        return optimizer.param_groups if optimizer is not None else []

    def skip_first_batches(self, dataloader: DistributedLoader, num_batches: int = 0) -> Any:
        """The loader, whose next pass skips this many batches."""
        consumed = num_batches * dataloader.samples_per_round
        dataloader.load_state_dict({"epoch": dataloader.epoch, "consumed_samples": consumed})
        return dataloader


def _get_plain_state(holder: Any) -> dict[str, Any]:
    """The state to restore an object from, without functions, which cannot be saved."""
    return {name: value for name, value in holder.state_dict().items() if not callable(value)}
