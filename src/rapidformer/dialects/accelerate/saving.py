"""The part of ``Accelerator`` that saves and loads: weights, and the state of a run."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from rapidformer.checkpoint.export import export_model, gather_weights, list_weights, merge_export
from rapidformer.checkpoint.writing import writing
from rapidformer.data.loader import DistributedLoader
from rapidformer.dialects.accelerate.processes import ProcessVerbs
from rapidformer.dialects.accelerate.settings import ProjectConfiguration
from rapidformer.dist.attendance import run_by_first
from rapidformer.dist.collectives import broadcast_object
from rapidformer.engine.engine import RapidformerEngine
from rapidformer.errors import CheckpointError, ConfigurationError, RapidformerError
from rapidformer.log import warn_once
from rapidformer.models.adapters import find_adapter, get_inner
from rapidformer.overlay import extend, list_layers

Hook = Callable[..., None]
_KINDS = {"schedulers": "prepared schedulers", "registered": "registered objects"}
_LARGEST = "10GB"
"""Accelerate's default size of a file; nothing is split here."""


class SavingVerbs(ProcessVerbs):
    """What is written to disk and read from it."""

    project_dir: str | None
    project_configuration: ProjectConfiguration
    dataloader_config: Any
    _models: list[nn.Module]
    """All that were prepared; each optimizer's is trained, the others (a teacher) only run."""
    _engines: list[RapidformerEngine]
    """One for each optimizer with its model; the first has the data."""
    _schedulers: list[LRScheduler]
    _registered: list[Any]
    """What the script saves with the state."""
    _save_hooks: OrderedDict[int, Hook]
    _load_hooks: OrderedDict[int, Hook]

    def unwrap_model(self, model: nn.Module, **options: Any) -> nn.Module:
        """The model: nothing is ever wrapped. Of a sharded one, every process must save."""
        engine = self._find_trainer(model)
        if engine is None or "saving" in list_layers(model):
            return model
        if any(isinstance(weight, DTensor) for weight in engine.model.parameters):
            extend(model, "saving", partial(self._build_saving, engine))
        return model

    def _build_saving(self, engine: RapidformerEngine, cls: Any) -> dict[str, Any]:
        def save_pretrained(
            module: nn.Module, save_directory: str | Path, *values: Any, **options: Any
        ) -> None:
            if options.get("state_dict") is not None:  # gathered already
                cls.save_pretrained(module, save_directory, *values, **options)
            else:
                engine.checkpoints.export_into(save_directory)

        return {"save_pretrained": save_pretrained} if hasattr(cls, "save_pretrained") else {}

    def _find_trainer(self, model: nn.Module) -> RapidformerEngine | None:
        """What ``prepare`` has switched it on with; None for a teacher or a model of its own."""
        inner = get_inner(model)
        return next((each for each in self._engines if each.model.module is inner), None)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """A model's weights whole; if sharded, on the first process, and all must call this."""
        if (engine := self._find_trainer(model)) is not None:
            return engine.checkpoints.gather_weights(everywhere=True)
        inner = get_inner(model)
        return gather_weights(inner) or list_weights(inner)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = _LARGEST,
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights whole, as a folder that ``from_pretrained`` loads."""
        if max_shard_size != _LARGEST or not safe_serialization:
            warn_once("save_model(): max_shard_size and safe_serialization have no effect.")
        if (engine := self._find_trainer(model)) is not None:
            engine.checkpoints.export_into(save_directory)
            return
        inner, target = get_inner(model), Path(save_directory)

        def write() -> None:
            with writing(target):
                exported = export_model(
                    inner, target / ".exported", self.engine.runtime.topology,
                    adapter=find_adapter(inner),
                )  # fmt: skip
            merge_export(exported, target)

        run_by_first(f"save_model({str(target)!r})", write)

    def save(self, content: Any, file: str | Path, safe_serialization: bool = False) -> None:
        """``torch.save``, once; or ``safe_serialization`` of tensors by their names."""
        if not self.is_main_process:
            return
        if not safe_serialization:
            torch.save(content, file)
            return
        if not isinstance(content, dict) or not all(
            isinstance(each, torch.Tensor) for each in content.values()
        ):
            raise RapidformerError(
                f"save(..., {str(file)!r}, safe_serialization=True) takes a dictionary of tensors, "
                "such as get_state_dict(model): leave safe_serialization out for other objects."
            )
        from safetensors.torch import save_file

        # safetensors refuses shared memory: a tied weight is stored under each of its names.
        save_file({name: tensor.clone().contiguous() for name, tensor in content.items()}, file)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these with the state; their ``state_dict()`` must be plain numbers."""
        verbs = ("state_dict", "load_state_dict")
        unfit = [
            f"Item at index {index}, of type {type(each).__name__}, has no state_dict() and "
            "load_state_dict(): it cannot be saved with the state."
            for index, each in enumerate(objects)
            if not all(hasattr(each, verb) for verb in verbs)
        ]
        if unfit:
            raise ConfigurationError(unfit)
        self._registered += objects

    def register_save_state_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(models, weights, folder)`` before a state is saved; all weights still are."""
        return _register(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(models, folder)`` before a state is loaded."""
        return _register(self._load_hooks, hook)

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint that ``save_state`` names by itself."""
        return self.project_configuration.iteration

    def save_state(
        self, output_dir: str | Path | None = None, safe_serialization: bool = True, **options: Any
    ) -> str:
        """Save model, optimizer, prepared schedulers, random states and data position."""
        self.compose_without_optimizer("save_state()")
        is_named = self.project_configuration.automatic_checkpoint_naming
        if output_dir is None and not is_named:
            raise RapidformerError(
                "save_state() needs a folder: save_state(output_dir), or "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
            )
        call = f"save_state({str(output_dir or '')!r})"
        with self.engine.checkpoints.attending(call) as takes_part:
            folder = self._name_checkpoint() if is_named else Path(str(output_dir))
            return self._save_state(folder, is_named=is_named) if takes_part else str(folder)

    def _save_state(self, folder: Path, *, is_named: bool) -> str:
        if self._save_hooks:
            folder.mkdir(parents=True, exist_ok=True)
            weights = [self.get_state_dict(model) for model in self._models]
            for hook in self._save_hooks.values():
                hook(list(self._models), weights, str(folder))
        extra = {
            "rates": [float(group["lr"]) for group in self._get_groups()],
            "schedulers": list(map(_get_plain_state, self._schedulers)),
            "registered": list(map(_get_plain_state, self._registered)),
        }
        # The first one's is complete last, and names those of the others that belong to it.
        extra["others"] = [
            engine.save_checkpoint(folder / f"model_{number}").name
            for number, engine in enumerate(self._engines[1:], 1)
        ]
        saved = self.engine.save_checkpoint(folder, extra)
        if is_named:
            self.project_configuration.iteration += 1
            self._drop_oldest()
        return str(saved)

    def _name_checkpoint(self) -> Path:
        # Rank 0 may have saved alone since.
        self.project_configuration.iteration = broadcast_object(self.save_iteration)
        folder = self._get_checkpoints() / f"checkpoint_{self.save_iteration}"
        if broadcast_object(folder.exists()):
            raise RapidformerError(
                f"{folder} is there already: continue after it with "
                f"ProjectConfiguration(iteration={self.save_iteration + 1}, ...), or give another "
                "project_dir."
            )
        return folder

    def _get_checkpoints(self) -> Path:
        if self.project_dir is None:
            raise RapidformerError(
                "automatic_checkpoint_naming needs a folder: give ProjectConfiguration or "
                "Accelerator a project_dir."
            )
        return Path(self.project_dir) / "checkpoints"

    def _list_checkpoints(self) -> list[Path]:
        """Those that were named automatically, oldest first."""
        found = self._get_checkpoints().glob("checkpoint_*")
        numbered = [path for path in found if path.name.rpartition("_")[2].isdecimal()]
        return sorted(numbered, key=lambda path: int(path.name.rpartition("_")[2]))

    def _drop_oldest(self) -> None:
        limit = self.project_configuration.total_limit
        if limit is not None and self.is_main_process:
            for path in self._list_checkpoints()[: -max(1, limit)]:
                shutil.rmtree(path)
        self.wait_for_everyone()

    def load_state(self, input_dir: str | Path | None = None, **options: Any) -> None:
        """Resume from ``save_state``; the loader restarts the epoch (``skip_first_batches``).

        With ``DataLoaderConfiguration(use_stateful_dataloader=True)``, it goes on where it was.
        """
        self.compose_without_optimizer("load_state()")
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = broadcast_object(next(reversed(self._list_checkpoints()), None))
        if input_dir is None:
            raise RapidformerError("load_state() needs a folder: load_state(input_dir).")
        folder = Path(input_dir).expanduser()
        for hook in self._load_hooks.values():
            hook(list(self._models), str(folder))
        extra = self.engine.load_checkpoint(folder)
        names = extra.get("others", [])
        if len(names) != len(self._engines) - 1:
            raise CheckpointError(
                f"{folder} was saved with {len(names) + 1} trained models, and there are "
                f"{len(self._engines)} now: prepare the same ones before load_state()."
            )
        for number, (engine, name) in enumerate(zip(self._engines[1:], names, strict=True), 1):
            engine.load_checkpoint(folder / f"model_{number}" / name)
        for kind, objects in (("schedulers", self._schedulers), ("registered", self._registered)):
            states = extra.get(kind, [])
            if len(states) != len(objects):
                raise CheckpointError(
                    f"{folder} was saved with {len(states)} {_KINDS[kind]}, and there are "
                    f"{len(objects)} now: prepare and register the same ones before load_state()."
                )
            for holder, state in zip(objects, states, strict=True):
                holder.load_state_dict(state)
        for group, rate in zip(self._get_groups(), extra.get("rates", []), strict=False):
            group["lr"] = rate
        loader = self.engine.data.train_loader
        is_stateful = getattr(self.dataloader_config, "use_stateful_dataloader", False)
        if loader is not None and not is_stateful:
            loader.load_state_dict({"epoch": loader.epoch, "consumed_samples": 0})

    def compose_without_optimizer(self, verb: str) -> None:
        raise NotImplementedError

    def _get_groups(self) -> list[dict[str, Any]]:
        optimizers = [engine.updates.optimizer for engine in self._engines]
        return [group for each in optimizers if each is not None for group in each.param_groups]

    def skip_first_batches(self, dataloader: DistributedLoader, num_batches: int = 0) -> Any:
        """The loader without this many batches of its next epoch, which it skips unread."""
        return RemainingBatches(dataloader, num_batches)


class RemainingBatches:
    """The rest of a loader's epoch; everything else is the loader's, whose own length stays."""

    def __init__(self, loader: DistributedLoader, skipped: int) -> None:
        self._loader, self._skipped = loader, skipped

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._skipped)

    def __iter__(self) -> Iterator[Any]:
        consumed = self._skipped * self._loader.samples_per_round
        self._loader.load_state_dict({"epoch": self._loader.epoch, "consumed_samples": consumed})
        return iter(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _register(hooks: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _get_plain_state(holder: Any) -> dict[str, Any]:
    """The state to restore an object from, without functions, which cannot be saved."""
    state = {name: value for name, value in holder.state_dict().items() if not callable(value)}
    try:
        json.dumps(state)
    except (TypeError, ValueError) as reason:
        raise RapidformerError(
            f"the state of {type(holder).__name__} is more than numbers and texts ({reason}): save "
            "it in a hook, register_save_state_pre_hook(hook), and load it in another."
        ) from None
    return state
