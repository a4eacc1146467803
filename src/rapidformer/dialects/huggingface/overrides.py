"""What a subclass overrides: methods of transformers' Trainer that are never called are refused."""

from __future__ import annotations

from typing import Any

from transformers import Seq2SeqTrainer, Trainer

from rapidformer.errors import raise_problems

_NOT_CALLED = {"get_total_train_batch_size"}
_INSTEAD = {
    "_save": "save_model",
    "_save_checkpoint": "save_model, or a callback's on_save",
    "_evaluate": "evaluate",
    "_get_dataloader": "get_train_dataloader and get_eval_dataloader",
    "_remove_unused_columns": "_set_signature_columns_if_needed, or data_collator=",
    "_get_collator_with_removed_columns": "_set_signature_columns_if_needed, or data_collator=",
    "get_batch_samples": "get_train_dataloader; num_items_in_batch is each micro-batch's own",
    "_get_num_items_in_batch": "compute_loss, which may divide a sum by any number",
    "_prepare_input": "_prepare_inputs",
    "_clip_grad_norm": "a callback's on_pre_optimizer_step, with max_grad_norm=0",
    "_get_learning_rate": "create_scheduler, or log",
    "get_optimizer_cls_and_kwargs": "create_optimizer, or pass optimizer_cls_and_kwargs=",
    "_load_best_model": "a callback's on_train_end",
    "_determine_best_metric": "evaluate: metric_for_best_model may be any number that it returns",
    "get_total_train_batch_size": "per_device_train_batch_size and gradient_accumulation_steps",
    "set_initial_training_values": "max_steps, or get_train_dataloader",
    "store_flos": "floating_point_ops",
    "init_hf_repo": "push_to_hub",
    "_wrap_model": "nothing: the model is never wrapped",
    "_move_model_to_device": "nothing: the engine places the model",
}
_OTHERWISE = "training_step, compute_loss or a callback"


def check_overrides(cls: type, base: type) -> None:
    """Refuse methods of transformers' trainers that a subclass overrides and nothing here calls."""
    theirs: dict[str, Any] = {**vars(Trainer), **vars(Seq2SeqTrainer)}
    below = cls.__mro__[: cls.__mro__.index(base)]
    own = [kind for kind in below if not kind.__module__.startswith("rapidformer.")]
    problems = [
        f"{kind.__name__}.{name}: transformers' Trainer calls this method, rapidformer's does not. "
        f"Use {_INSTEAD.get(name, _OTHERWISE)}."
        for kind in own
        for name in vars(kind)
        if not name.startswith("__")
        and callable(getattr(theirs.get(name), "__func__", theirs.get(name)))
        and (name in _NOT_CALLED or not hasattr(base, name))
    ]
    raise_problems(problems)
