"""What a trainer leaves behind, and names that overridden methods copy from transformers."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel
from transformers import Trainer as Theirs

from rapidformer.checkpoint.finding import find_checkpoint
from rapidformer.data.nested import map_tensors
from rapidformer.dialects.huggingface.interface import TrainerInterface
from rapidformer.engine.checkpoints import EXPORTED
from rapidformer.errors import CheckpointError, ConfigurationError
from rapidformer.log import get_logger
from rapidformer.models.adapters import get_inner
from rapidformer.models.location import DESCRIPTION
from rapidformer.strict_json import format_json

if TYPE_CHECKING:
    from rapidformer.dialects.huggingface.callbacks import CallbackList

STATE_FILE = "trainer_state.json"
_NOT_PUSHED = [
    "iter_*", "previous/*", "checkpoint-*", "tensorboard/*", "trackers/*", "best/*", "last/*",
    "logs/*",
]  # fmt: skip


class RunRecords(TrainerInterface):
    """The part of ``Trainer`` that writes."""

    callbacks: CallbackList

    @property
    def callback_handler(self) -> CallbackList:
        """transformers' name for the list of callbacks."""
        return self.callbacks

    # These ask nothing of a trainer that this one does not have.
    add_callback, pop_callback = Theirs.add_callback, Theirs.pop_callback
    remove_callback = Theirs.remove_callback
    is_world_process_zero = Theirs.is_world_process_zero
    is_local_process_zero = Theirs.is_local_process_zero
    get_num_trainable_parameters = Theirs.get_num_trainable_parameters
    log_metrics = Theirs.log_metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Keep numbers in the history of the run and tell the callbacks."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.callbacks.call("on_log", logs=logs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model and tokenizer for ``from_pretrained``; if sharded, on every process."""
        folder = Path(output_dir or self.args.output_dir or ".")
        if self.is_world_process_zero():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "training_args.json").write_text(self.args.to_json_string(), encoding="utf-8")
        self.engine.checkpoints.export_into(folder, self.saved_processor)

    @property
    def saved_processor(self) -> Any:
        """What is saved beside the model: without processing_class, the collate function's."""
        own = getattr(self.data_collator, "tokenizer", None)
        return own if self.processing_class is None else self.processing_class

    def save_state(self) -> None:
        """Save the history of the run as transformers does, in ``trainer_state.json``."""
        if self.is_world_process_zero():
            self.state.save_to_json(str(self._make_folder() / STATE_FILE))

    def _make_folder(self) -> Path:
        folder = Path(self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``<split>_results.json``, and add to ``all_results.json``."""
        if not self.is_world_process_zero():
            return
        folder = self._make_folder()
        _write_json(folder / f"{split}_results.json", metrics)
        if combined:
            path = folder / "all_results.json"
            before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            _write_json(path, {**before, **metrics})

    def create_model_card(self, **details: Any) -> None:
        """Write a short ``README.md`` next to the model: what it is, and its last numbers."""
        if not self.is_world_process_zero():
            return
        folder = self._make_folder()
        name = details.get("model_name") or folder.resolve().name
        lines = [f"# {name}", "", f"{type(self.model).__name__}, trained with rapidformer.", ""]
        facts = {key: value for key, value in details.items() if value}
        lines += [f"- {key.replace('_', ' ')}: {value}" for key, value in facts.items()]
        numbers = [line for line in self.state.log_history if any("eval_" in k for k in line)]
        if numbers:
            lines += ["", "| metric | value |", "|---|---|"]
            lines += [f"| {k} | {v} |" for k, v in numbers[-1].items() if k.startswith("eval_")]
        (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def push_to_hub(
        self, commit_message: str | None = "End of training", blocking: bool = True, **details: Any
    ) -> Any:
        """Save the model and upload the output folder's model files to the Hub."""
        self.save_model()
        self.create_model_card(**{k: v for k, v in details.items() if k != "token"})
        if not self.is_world_process_zero():
            return None
        from huggingface_hub import HfApi

        args, folder = self.args, Path(self.args.output_dir or ".")
        api: Any = HfApi(token=details.get("token") or args.hub_token)
        name = args.hub_model_id or folder.resolve().name
        repository = api.create_repo(name, private=args.hub_private_repo, exist_ok=True)
        return api.upload_folder(
            repo_id=repository.repo_id, folder_path=str(folder), commit_message=commit_message,
            revision=args.hub_revision, ignore_patterns=_NOT_PUSHED, run_as_future=not blocking,
        )  # fmt: skip

    def _log_line(self, metrics: dict[str, Any], what: str) -> None:
        """One line for the person at the terminal; the loop logs its own evaluations."""
        if self._is_training or not self.is_world_process_zero():
            return
        numbers = " | ".join(
            f"{name.partition('_')[2].replace('_', ' ')} {value:.4f}"
            for name, value in metrics.items()
            if isinstance(value, float) and math.isfinite(value) and "_per_second" not in name
        )
        get_logger().info(f"{what} | {numbers}")

    # What these names mean here; none of them needs to be overridden.
    label_smoother = None
    """The loop smooths labels itself (``label_smoothing_factor``)."""
    current_gradient_accumulation_steps = 1
    """Do not divide the loss of a micro-batch: the loop weights each by its labels."""
    model_accepts_loss_kwargs = False
    is_fsdp_enabled = is_fsdp_xla_enabled = is_tp_enabled = False
    """The model is never wrapped, whatever shards it."""

    @property
    def is_deepspeed_enabled(self) -> bool:
        return bool(self.args.deepspeed)

    @property
    def model_wrapped(self) -> nn.Module:
        """The model: nothing is ever wrapped."""
        return self.model

    @property
    def is_in_train(self) -> bool:
        return self._is_training

    def num_examples(self, dataloader: Any) -> int:
        """The rows of a loader's data."""
        count = getattr(dataloader, "num_samples", None)
        return int(count) if count is not None else len(dataloader.dataset)

    def get_total_train_batch_size(self, args: Any = None) -> int:
        """Rows per optimizer step, over all processes."""
        return int(self.engine.args.global_batch_size or 0)

    def get_learning_rates(self) -> list[float]:
        """Of each parameter group."""
        return [float(group["lr"]) for group in self._get_groups()]

    def get_optimizer_group(self, param: nn.Parameter | None = None) -> Any:
        """The group that holds a parameter, or the parameters of all groups."""
        groups = self._get_groups()
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(p is param for p in group["params"])), None)

    def _get_groups(self) -> list[dict[str, Any]]:
        if self.optimizer is None:
            raise ConfigurationError(
                "the Trainer has no optimizer yet: call create_optimizer() or train() first."
            )
        return self.optimizer.param_groups

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager[None]:
        """The model runs in the precision of the run by itself."""
        return nullcontext()

    def floating_point_ops(self, inputs: Any) -> int:
        """transformers' estimate of a forward and a backward pass; 0 if the model shows nothing."""
        name, model = getattr(self.model, "main_input_name", "input_ids"), get_inner(self.model)
        if name not in inputs or not isinstance(model, PreTrainedModel):
            return 0
        return int(6 * inputs[name].numel() * model.num_parameters(exclude_embeddings=True))

    counted_work = 0.0
    """Of this process's batches in this run, by an override of ``floating_point_ops``."""

    def count_work(self, inputs: Any) -> None:
        self.counted_work += self.floating_point_ops(inputs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The loop's batches are on the device already; those of a call by hand may not be."""
        if self._is_training:
            return inputs
        return map_tensors(inputs, lambda _, tensor: tensor.to(self.args.device))

    def compute_loss_context_manager(self) -> AbstractContextManager[None]:
        return self.autocast_smart_context_manager()


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(format_json(values, indent=4, sort_keys=True, default=str), encoding="utf-8")


# ---- checkpoints as folders that scripts look for and `from_pretrained` reads --------------------


def link_checkpoint(folder: Path, step: int) -> None:
    """``checkpoint-500`` next to ``iter_0000500``: the name that scripts look for."""
    for link in folder.parent.glob("checkpoint-*"):
        if link.is_symlink() and not link.exists():
            link.unlink()  # its checkpoint has been removed
    with contextlib.suppress(OSError):  # a file system without links
        (folder.parent / f"checkpoint-{step}").symlink_to(folder.name)


def list_weights(checkpoint: Path) -> list[tuple[str, int]]:
    files = sorted(checkpoint.glob("model*.safetensors"))
    return [(path.name, path.stat().st_mtime_ns) for path in files]


def lift_model(checkpoint: Path) -> None:
    """Configuration, tokenizer and adapter as well where ``from_pretrained`` looks for them."""
    for source in (checkpoint / EXPORTED, checkpoint / DESCRIPTION):
        for path in source.glob("*"):
            target = checkpoint / path.name
            if path.is_file() and not target.exists():
                shutil.copyfile(path, target)  # no link: a callback may overwrite it


def find_checkpoint_folder(asked: str | bool | Path | None, output_dir: str | None) -> Path | None:
    """What ``resume_from_checkpoint`` means: True is the newest one in the output folder."""
    if asked is None or asked is False or asked == "":
        return None
    is_newest = asked is True or str(asked).lower() == "true"
    source = Path(output_dir or ".") if is_newest else Path(str(asked)).expanduser()
    checkpoint = find_checkpoint(source.resolve()) if source.is_dir() else None
    if checkpoint is None:
        raise CheckpointError(
            f"resume_from_checkpoint={asked!r}: {source} holds no checkpoint (iter_… folders). "
            "Checkpoints of transformers' own Trainer cannot be resumed: start from their weights "
            "with from_pretrained()."
        )
    return checkpoint
