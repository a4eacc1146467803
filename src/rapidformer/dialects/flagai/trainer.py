"""FlagAI's trainer on the one loop: it starts the processes, and ``train`` makes the engine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from rapidformer.checkpoint.finding import find_checkpoint
from rapidformer.config import Settings
from rapidformer.config.derive import is_launched
from rapidformer.data.loader import DistributedLoader
from rapidformer.dialects.calls import in_words_of
from rapidformer.dialects.flagai import settings as flagai_settings
from rapidformer.dialects.flagai.names import FLAGAI
from rapidformer.dialects.huggingface.arguments import TrainingArguments
from rapidformer.dialects.huggingface.bridge import TrainerTemplate
from rapidformer.dialects.huggingface.callbacks import build_state
from rapidformer.dialects.huggingface.interface import Inputs, Keys, Metrics, Prediction
from rapidformer.dialects.huggingface.loss import takes
from rapidformer.dialects.huggingface.trainer import Trainer
from rapidformer.dialects.huggingface.weights import load_weights
from rapidformer.dist.seeding import seed_everything
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.log import configure_logging, get_logger, warn_once

# What FlagAI strips from a batch before the model sees it.
_NOT_INPUTS = ("uid", "meta", "mode")
_SAVED_BEST = "saved_best"


class BestScore(TrainerCallback, ExportableState):
    """The best score so far and how often there was a new one; checkpoints hold both."""

    def __init__(self, worst: float) -> None:
        self._worst = worst
        self.score: Any = worst
        self.times = 0

    def state(self) -> dict[str, Any]:
        attributes = {"times": self.times}
        try:
            json.dumps(self.score)
            attributes["score"] = self.score
        except TypeError:
            warn_once(
                f"save_best returns a {type(self.score).__name__}, which a checkpoint cannot hold: "
                "a resumed run starts without a best score. Return a number."
            )
        return {"args": {"worst": self._worst}, "attributes": attributes}


class FlagAITrainer(Trainer):
    """``env_type`` chooses the back end; ``forward_step`` is the one method to override."""

    room = "rapidformer.dialects.flagai"

    @in_words_of(FLAGAI)
    def __init__(self, **named: Any) -> None:
        configure_logging()
        self.values = values = flagai_settings.complete(named)
        self._said = set(named)
        self.env_type: str = values["env_type"]
        device = str(values["pytorch_device"])
        if self.env_type != "pytorch":
            _launch_self(values)
        elif device.startswith("cuda:") and device != "cuda:0" and not torch.cuda.is_initialized():
            # The one GPU that this process sees.
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", device.removeprefix("cuda:"))
        flagai_settings.report_unused(values, self._said)
        seed_everything(int(values["seed"]), deterministic=False)
        for name in ("epochs", "batch_size", "lr", "experiment_name", "save_dir", "tokenizer"):
            setattr(self, name, values[name])

    def forward_step(self, data: Inputs, model: nn.Module, mems: Any = None) -> dict[str, Any]:
        """A dictionary with the ``loss``, and ``logits`` for metrics."""
        outputs: Any = model(**data)
        return dict(outputs)

    @in_words_of(FLAGAI)
    def train(  # type: ignore[override]
        self,
        model: nn.Module | None = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        train_dataset: Any = None,
        valid_dataset: Any = None,
        metric_methods: list[MetricMethod] | None = None,
        collate_fn: Any = None,
        find_unused_parameters: bool = True,
    ) -> None:
        """Train and evaluate; ``epochs=0`` evaluates only."""
        if not isinstance(model, nn.Module):
            raise ConfigurationError(
                f"train() needs the model first, got {type(model).__name__}: "
                "trainer.train(model, train_dataset=..., collate_fn=...)."
            )
        self._take(model, train_dataset, valid_dataset, collate_fn, metric_methods)
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self._load_given_weights()
        if not self.values["epochs"]:
            if valid_dataset is not None:
                self.evaluate()
            return
        self._engine = self._build_engine(self.build_settings())
        self.state = build_state(self)
        self._run(TrainerTemplate(self, self._engine))

    def _take(self, model: nn.Module, train: Any, valid: Any, collate: Any, methods: Any) -> None:
        """What Hugging Face's constructor is given comes with ``train`` here."""
        values = self.values
        self.model, self.model_init, self._engine = model, None, None
        self.train_dataset, self.eval_dataset = train, valid
        self.metric_methods = list(methods or [])
        # As in FlagAI: with metrics, `save_best` maximizes.
        self._best = BestScore(float("-inf" if self.metric_methods else "inf"))
        size = int(values["batch_size"])
        self.args = TrainingArguments(
            str(values["save_dir"] or "."), seed=int(values["seed"]),
            per_device_train_batch_size=size, per_device_eval_batch_size=size,
            metric_for_best_model=_SAVED_BEST if values["save_best"] else "loss",
            remove_unused_columns=False, eval_do_concat_batches=False,
            restore_callback_states_from_checkpoint=True,
        )  # fmt: skip
        self.processing_class = values["tokenizer"]
        self.data_collator = collate
        self.compute_loss_func = self.compute_metrics = self.preprocess_logits_for_metrics = None
        self._given_optimizers = (None, None)
        self._optimizer_class = None
        self._start_records([self._best])

    def build_settings(self) -> Settings:
        """The arguments as the settings of a run."""
        settings = flagai_settings.build_settings(self.values, self._said).replace(
            "derived: save_best", metric_for_best_model=self.args.metric_for_best_model
        )
        if self._resumes():
            settings = settings.replace("load_dir", load=str(self.values["load_dir"]))
        return settings

    def _resumes(self) -> bool:
        """Whether the run continues a checkpoint; otherwise ``load_dir`` gives weights alone."""
        is_asked = all(self.values[name] for name in ("load_dir", "load_optim", "epochs"))
        return is_asked and find_checkpoint(Path(self.values["load_dir"])) is not None

    def _load_given_weights(self) -> None:
        """The weights in ``load_dir``, for a run that starts at step 0."""
        values = self.values
        folder = values["load_dir"]
        if folder is None or self._resumes():
            return
        trains, exists = bool(values["epochs"]), Path(folder).is_dir()
        if trains and not exists and not values["load_optim"]:
            warn_once(f"load_dir={folder!r} does not exist: training starts from the model given.")
            return
        load_weights(self.model, Path(folder), best=values["load_type"] != "latest")
        if trains and values["load_optim"]:
            warn_once(f"load_dir={folder!r} holds no checkpoint: the optimizer starts fresh.")

    def run_training_step(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self._forward(model, batch)[0]

    def _forward(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
        data = batch
        if isinstance(batch, Mapping):
            data = {name: value for name, value in batch.items() if name not in _NOT_INPUTS}
        outputs = self.forward_step(data, model, None)
        if not isinstance(outputs, Mapping) or "loss" not in outputs:
            raise RapidformerError(
                "forward_step must return a dictionary with 'loss', got "
                f"{', '.join(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__}."
            )
        loss: torch.Tensor = outputs["loss"]
        return loss.mean() if loss.dim() else loss, outputs

    def get_dataloader(self, dataset: Any, collate_fn: Any = None, shuffle: bool = False) -> Any:
        """A loader for this rank's part of the data; a ready ``DataLoader`` stays as it is."""
        if isinstance(dataset, (DataLoader, DistributedLoader)):
            return dataset
        return self.engine.data.build_loader(
            dataset, collate_fn, shuffle=shuffle, is_training=shuffle
        )

    def get_train_dataloader(self) -> Any:
        if self.train_dataset is None:
            raise ConfigurationError("train() needs train_dataset=..., or epochs=0 to evaluate.")
        return self.get_dataloader(self.train_dataset, self.data_collator, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        return self.get_dataloader(dataset, self.data_collator)

    def _can_train(self) -> bool:
        return self.train_dataset is not None and bool(self.values["epochs"])

    @in_words_of(FLAGAI)
    def evaluate(  # type: ignore[override]
        self,
        data_loader: Any = None,
        model: nn.Module | None = None,
        forward_step_func: Any = None,
        verbose: bool = False,
    ) -> Metrics:
        """The loss and every metric, by their own names."""
        if model is not None and model is not getattr(self, "model", None):
            self._take(model, None, data_loader, None, getattr(self, "metric_methods", []))
        if forward_step_func is not None:
            self.forward_step = forward_step_func  # type: ignore[method-assign]
        loader = self.get_eval_dataloader(data_loader)
        output = self.evaluation_loop(
            loader, "Evaluation", prediction_loss_only=not self.metric_methods
        )
        metrics = compute_methods(
            self.metric_methods, output.predictions, output.label_ids, self.values["tokenizer"]
        )
        metrics["loss"] = (output.metrics or {}).get("eval_loss", float("nan"))
        self.callbacks.call("on_evaluate", metrics=metrics, eval_dataloader=loader)
        self._log_line({f"eval_{name}": value for name, value in metrics.items()}, "validation")
        return metrics

    def evaluate_in_training(self) -> Metrics:
        metrics = self.evaluate()
        if self.values["save_best"] is None:
            return metrics
        best = self._best
        score = self.values["save_best"](best.score, metrics)
        best.times += score != best.score
        best.score = score
        return {**metrics, _SAVED_BEST: float(best.times)}

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: Keys = None
    ) -> Prediction:
        loss, outputs = self._forward(model, inputs)
        labels = inputs.get("labels", inputs.get("target_ids"))
        if prediction_loss_only or outputs.get("logits") is None or labels is None:
            return loss.detach(), None, None
        return loss.detach(), outputs["logits"].argmax(-1), labels


def _launch_self(values: Mapping[str, Any]) -> None:
    """Start the script in every process; returns only where there is nothing to start."""
    if is_launched():
        return  # started by a launcher: ours, torchrun's, DeepSpeed's
    processes, nodes = int(values["num_gpus"]), int(values["num_nodes"])
    hostfile = values["hostfile"]
    flags = ["--nproc-per-node", str(processes)]
    has_hosts = hostfile is not None and Path(hostfile).expanduser().is_file()
    if hostfile is not None and not has_hosts:
        get_logger().info(f"there is no hostfile {hostfile}: the run is on this node alone")
    if has_hosts:
        flags = ["--hostfile", str(hostfile)]
    elif nodes > 1 and hostfile is None:
        flags += ["--nnodes", str(nodes)]
        if values["master_ip"] is not None:
            flags += ["--master-addr", values["master_ip"]]
            flags += ["--master-port", str(values["master_port"])]
    elif processes == 1:
        return
    _become_launcher(flags, str(values["training_script"]))


def _become_launcher(flags: list[str], script: str) -> None:
    """By ``exec``, so that signals reach it and its exit status is the run's."""
    path = Path(script)
    if not path.is_file():
        raise ConfigurationError(
            f"training_script={script!r} is not a file: pass training_script=__file__, so that "
            "every process can run it."
        )
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        raise ConfigurationError(
            "a notebook cannot start itself in several processes: save it as a script and use "
            "`rapidformer launch script.py`."
        )
    words = ["-m", "rapidformer.cli.main", "launch", *flags, str(path.resolve()), *sys.argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *words])


MetricMethod = Sequence[Any]
"""``[name, function]``; ``function(predictions, labels, meta=..., tokenizer=...)``."""


def compute_methods(
    methods: Sequence[MetricMethod], predictions: Any, labels: Any, tokenizer: Any
) -> dict[str, float]:
    """Every metric by its name; rows of tokens, whose lengths differ, come as a list of tensors."""
    if not methods or predictions is None or labels is None:
        return {}
    joined: list[Any] = [
        [row for batch in batches for row in torch.as_tensor(batch)]
        for batches in (predictions, labels)
    ]
    extra = {"tokenizer": tokenizer, "meta": None}
    if joined[0][0].dim() == 0:
        joined = [torch.stack(rows) for rows in joined]
    metrics: dict[str, float] = {}
    for name, function in methods:
        # Not every function takes the meta data and the tokenizer: FlagAI's own do not.
        taken = {word: value for word, value in extra.items() if takes(function, word)}
        metrics[str(name)] = float(function(*joined, **taken))
    return metrics
