"""Pre-training as a black box: the PreTrainer that scripts use, from the settings alone.

The model's type chooses its objective; its vocabulary fits the tokenizer.
"""

from __future__ import annotations

import inspect
import time
from typing import TYPE_CHECKING, Any

import torch

from rapidformer.context import get_tokenizer
from rapidformer.data.pretraining import build_pretraining_datasets
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import DataError, ModelError, raise_problems
from rapidformer.models.build import build_pretrained, check_fits, load_tokenizer
from rapidformer.models.configuration import get_size, load_config
from rapidformer.models.evaluation_mode import evaluation_mode
from rapidformer.models.location import get_model_location, is_from_scratch
from rapidformer.models.processor_files import keep_processor_files
from rapidformer.models.towers import list_values, reads_more_than_text
from rapidformer.objectives import Objective
from rapidformer.tasks.evaluation.evaluating import EvaluationReport
from rapidformer.tasks.pretraining.objectives import (
    HiddenSpans,
    HiddenTokens,
    HiddenTokensAndOrder,
    NextToken,
    NextTokenInMegatronsForm,
    PretrainingObjective,
)
from rapidformer.tasks.rows.preflight import find_missing_length
from rapidformer.tasks.text.text import check_towers
from rapidformer.training.evaluation import Metrics, evaluate_model
from rapidformer.training.pretrainer import ORDER_LABELS, PreTrainer

if TYPE_CHECKING:
    from torch import nn

    from rapidformer.config import Settings
    from rapidformer.data.tokenizers import Tokenizer

_SPLITS = {"train": 0, "validation": 1, "valid": 1, "test": 2}


class TaskPreTrainer(PreTrainer):
    """A PreTrainer whose hooks come from an objective."""

    has_shifted_labels = False  # objectives compare each position with its own label

    def __init__(self, engine: RapidformerEngine) -> None:
        super().__init__(engine)
        self.tokenizer = get_tokenizer()
        self.objective = choose_objective(self.args, self.tokenizer)
        self.processor = load_processor(self.args, self.tokenizer)

    def train_valid_test_datasets_provider(self, train_val_test_num_samples: list[int]) -> Any:
        datasets = build_pretraining_datasets(
            self.objective.name, self.args, train_val_test_num_samples, tokenizer=self.tokenizer,
            binary_head=self.objective.has_order_head,
            vocab_size=count_usable_tokens(self.objective),
        )  # fmt: skip
        if train_val_test_num_samples[0] and datasets[0] is None:
            raise DataError(f"--split {self.args.split!r} leaves no training data.")
        return datasets

    def model_optimizer_lr_scheduler_provider(self) -> tuple[Any, Any, Any]:
        return build_model(self.objective), None, None

    def build_objective(self) -> Objective:
        return self.objective


def pretrain(engine: RapidformerEngine) -> Metrics:
    raise_problems(list(find_missing_length(engine.args)))
    return TaskPreTrainer(engine).train()


def evaluate_pretraining(engine: RapidformerEngine) -> EvaluationReport:
    """Loss and perplexity on ``--eval-split``: a run's samples, given its length and intervals."""
    args = engine.args
    split = _SPLITS.get(args.eval_split)
    if split is None:
        raise DataError(f"--eval-split {args.eval_split}: use train, validation or test.")
    trainer = TaskPreTrainer(engine)
    counts = [args.eval_iters * (args.global_batch_size or 1)] * 3
    if engine.data.get_train_iters() is not None:
        counts = trainer.count_samples()
    wanted = [count if number == split else 0 for number, count in enumerate(counts)]
    dataset = trainer.train_valid_test_datasets_provider(wanted)[split]
    loader = trainer.build_eval_loader(dataset, None)
    if loader is None:
        raise DataError(
            f"the corpus has no {args.eval_split} data: --split {args.split!r} leaves none for it."
        )
    model = engine.model.compose_for_evaluation(build_model(trainer.objective))
    started = time.perf_counter()
    metrics = evaluate_model(engine, lambda: trainer.measure_loss(model, loader))
    return EvaluationReport(
        task="pretraining", split=args.eval_split, metrics=metrics, examples=loader.num_samples,
        seconds=round(time.perf_counter() - started, 3),
    )  # fmt: skip


_GPT_NAMES = ("gpt", "rapidformer_gpt")
_WITHOUT_PROCESSOR = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "NullTokenizer")
# Arguments of models with a head that predicts whether two segments were swapped.
_LENGTH = 14
# Relative to the effect without a mask: zero, except for the round-off of a mixture of experts.
_LARGEST_EFFECT = 1e-3
_LARGEST_DIFFERENCE = 1e-3
"""Between a document in a row and the same document alone, relative to the largest loss."""


def choose_objective(args: Settings, tokenizer: Tokenizer) -> PretrainingObjective:
    """Choose by model type: decoder, encoder with or without an order head, encoder-decoder."""
    if get_model_location(args) is None and args.model_type in _GPT_NAMES:
        return NextTokenInMegatronsForm(args, tokenizer)
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_PRETRAINING_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    config = load_config(args)
    kind = config.model_type
    if kind in _GPT_NAMES:
        return NextTokenInMegatronsForm(args, tokenizer)
    if kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and config.is_encoder_decoder:
        return HiddenSpans(args, tokenizer)
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        model_class: Any = MODEL_FOR_PRETRAINING_MAPPING.get(type(config), None)
        takes = inspect.signature(model_class.forward).parameters if model_class else {}
        objective = HiddenTokensAndOrder if ORDER_LABELS & set(takes) else HiddenTokens
        return objective(args, tokenizer)
    if reads_more_than_text(config):
        check_towers(config, args, allows_towers=True)
        return NextToken(args, tokenizer)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return NextToken(args, tokenizer)
    raise ModelError(
        f"--task pretraining does not know what a {kind} model learns from text: it needs a "
        "causal, a masked or a sequence-to-sequence language model. Write a PreTrainer for it."
    )


def build_model(objective: PretrainingObjective) -> nn.Module:
    """The model in fp32: pretrained, or new with a vocabulary that fits the tokenizer."""
    args, tokenizer = objective.args, objective.tokenizer
    if isinstance(objective, NextTokenInMegatronsForm):
        return _build_gpt(args, tokenizer)
    settings: dict[str, Any] = {}
    if is_from_scratch(args):
        size = get_size(load_config(args), "vocab_size")
        is_from_sizes = get_model_location(args) is None
        if size < tokenizer.vocab_size or (is_from_sizes and args.vocab_size is None):
            multiple = args.make_vocab_size_divisible_by
            settings["vocab_size"] = -(-tokenizer.vocab_size // multiple) * multiple
        if is_from_sizes:
            settings |= objective.get_token_ids()
    model = build_pretrained(objective.auto_class, args, **settings)
    if isinstance(objective, NextToken):
        check_documents(objective, model)
    return model


def count_usable_tokens(objective: PretrainingObjective) -> int:
    """The number of tokens that both tokenizer and model have; objectives insert only these."""
    args, tokenizer = objective.args, objective.tokenizer
    if is_from_scratch(args):
        return tokenizer.vocab_size
    room = get_size(load_config(args), "vocab_size") or tokenizer.vocab_size
    needed = objective.count_added_tokens()
    if room < needed:
        raise ModelError(
            f"{get_model_location(args)} has {room} token embeddings, but the tokenizer "
            f"{tokenizer.name} has {needed} tokens: use the model's own tokenizer, or "
            "--from-scratch."
        )
    return min(room, tokenizer.vocab_size)


def _build_gpt(args: Settings, tokenizer: Tokenizer) -> nn.Module:
    from rapidformer.models.deferred import build_for_split, splits_weights
    from rapidformer.models.gpt import GPTModel, config_from_arguments

    location = get_model_location(args)
    if location is not None and not args.from_scratch:
        load_config(args)  # checks the size flags against the folder
        return build_for_split(args, lambda: GPTModel.from_pretrained(location))
    config = config_from_arguments(args, max(args.vocab_size or 0, tokenizer.vocab_size))
    config.eos_token_id = tokenizer.eod if tokenizer.has_special("eod") else None
    if not splits_weights(args):
        check_fits(config, lambda: GPTModel(config))
    return build_for_split(args, lambda: GPTModel(config))


def load_processor(args: Settings, tokenizer: Tokenizer) -> Any:
    """transformers' version of the tokenizer, if any, with the tokens that Megatron's adds."""
    if args.tokenizer_type in _WITHOUT_PROCESSOR:
        return None
    of_model = args
    if args.tokenizer_name_or_path is not None:
        args = args.replace(
            "--tokenizer-name-or-path",
            load=args.tokenizer_name_or_path,
            pretrained_model_name_or_path=args.tokenizer_name_or_path,
        )
    processor = load_tokenizer(args)
    tokens = {token_id: token for token, token_id in tokenizer.vocab.items()}
    added = range(len(processor), tokenizer.vocab_size)
    processor.add_tokens([tokens[id_] for id_ in added if id_ in tokens], special_tokens=True)
    for role in ("bos", "eos"):
        # Megatron's version adds an end token to BERT's vocabulary, which T5 needs.
        if getattr(processor, f"{role}_token") is None and tokenizer.has_special(role):
            setattr(processor, f"{role}_token", tokens[getattr(tokenizer, role)])
    has_files = get_model_location(of_model) is not None
    if has_files and reads_more_than_text(load_config(of_model)):
        return keep_processor_files(processor, of_model)
    return processor


def check_documents(objective: NextToken, model: Any) -> None:
    """Refuse a model on which --reset-attention-mask or --reset-position-ids has no effect.

    It is run once on two documents, and refused if one affects the other: a model that accepts a
    mask does not necessarily obey it.
    """
    args = objective.args
    if args.reset_attention_mask:
        _check_window(model, args.seq_length or 0)
        with evaluation_mode(model), torch.no_grad():
            _try_two_documents(objective, model)
        return
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if args.reset_position_ids and not takes_positions:
        raise _refuse("--reset-position-ids", model, "does not accept position_ids")


def _check_window(model: Any, seq_length: int) -> None:
    """Our mask would replace the model's own, and with it the sliding window."""
    windows = [w for w in list_values(model.config, "sliding_window") if isinstance(w, int)]
    window = min((w for w in windows if w > 0), default=seq_length)
    if window < seq_length:
        raise _refuse(
            "--reset-attention-mask",
            model,
            f"has a sliding window of {window} tokens, shorter than --seq-length {seq_length}, "
            "which the mask would replace",
        )


def _try_two_documents(objective: NextToken, model: Any) -> None:
    end, length = objective.tokenizer.eod, min(_LENGTH, objective.args.seq_length or _LENGTH)
    first = length // 2
    count = model.get_input_embeddings().num_embeddings
    dice = torch.Generator().manual_seed(0)
    rows = (end + torch.randint(1, count, (2, length), generator=dice)) % count  # never the end
    rows[:, first - 1] = end
    rows[1, first:] = rows[0, first:]
    labels = rows[:1]

    def run(row: torch.Tensor, *, is_apart: bool) -> torch.Tensor:
        hidden, positions, _ = objective.get_masks(row) if is_apart else (None, None, None)
        mine = labels[:, -row.shape[1] :]
        losses, _ = objective.get_token_losses(model, row, mine, hidden, positions)
        return losses[0, first - length :].double()

    joined = run(rows[:1], is_apart=False) - run(rows[1:], is_apart=False)
    alone = run(rows[:1, first:], is_apart=False)
    try:
        apart = run(rows[:1], is_apart=True)
        effect = (apart - run(rows[1:], is_apart=True)).abs().max()
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        reason = f"does not accept a query-by-key attention mask ({error})"
        raise _refuse("--reset-attention-mask", model, reason) from error
    if effect > _LARGEST_EFFECT * joined.abs().max():
        fraction = float(effect / joined.abs().max())
        reason = f"lets a document see the one before it despite the mask (by {fraction:.0%})"
        raise _refuse("--reset-attention-mask", model, reason)
    restarts_positions = (apart - alone).abs().max() <= _LARGEST_DIFFERENCE * alone.max()
    if objective.args.reset_position_ids and not restarts_positions:
        raise _refuse(
            "--reset-position-ids", model, "does not restart the positions in each document"
        )


def _refuse(flag: str, model: Any, reason: str) -> ModelError:
    return ModelError(
        f"{flag}: {type(model).__name__} {reason}. Omit the flag, or choose another model."
    )
