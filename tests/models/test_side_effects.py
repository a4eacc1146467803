"""What ``--cuda-graph auto`` finds in a user's forward step that a replay would leave out."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import random
import time
from pathlib import Path
from time import time as get_time
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
)
from transformers.utils import ModelOutput

from rapidformer import Trainer
from rapidformer.accel.cuda_graph.graphs import ReplayedCode
from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.dialects.flagai.trainer import FlagAITrainer
from rapidformer.models.side_effects.examination import Examination

SEEN: list[float] = []
SCALE = 2.0


def smooth(loss: Any) -> Any:
    return loss * SCALE


def remember(loss: Any) -> Any:
    SEEN.append(loss)
    return loss


class Steps:
    factor = 0.5

    def __init__(self) -> None:
        self.steps = 0
        self.criterion = nn.CrossEntropyLoss()
        self.history: list[Any] = []

    def plain(self, batch: Any, model: Any) -> Any:
        labels = batch.pop("labels")
        outputs = model(**batch)
        loss = functional.cross_entropy(outputs.logits, labels) + self.criterion(outputs[0], labels)
        return smooth(loss) * self.factor, len(labels), {"loss": loss.detach()}

    def from_iterator(self, data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        with torch.no_grad():
            weight = torch.ones(2)
        return sum(model(batch[name]) for name in sorted(batch)), weight

    def counts(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        return model(**batch).loss

    def prints(self, batch: Any, model: Any) -> Any:
        print(batch)
        return model(**batch).loss

    def keeps(self, batch: Any, model: Any) -> Any:
        loss = model(**batch).loss
        self.history.append(loss)
        return loss

    def calls(self, batch: Any, model: Any) -> Any:
        return remember(model(**batch).loss)

    def marks(self, batch: Any, model: Any) -> Any:
        model.is_marked = True
        return model(**batch).loss

    def times(self, batch: Any, model: Any) -> Any:
        self.plain(batch, model)
        return model(**batch).loss * time.time()

    def times_by_name(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss * get_time()

    def saves(self, batch: Any, model: Any) -> Any:
        torch.save(batch, "batch.pt")
        return model(**batch).loss

    def seeds(self, batch: Any, model: Any) -> Any:
        torch.manual_seed(0)
        return model(**batch).loss

    def synchronizes(self, batch: Any, model: Any) -> Any:
        torch.cuda.synchronize()
        return model(**batch).loss

    def draws(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss * torch.rand(1)

    def chooses(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss * random.random()

    def draws_on_device(self, batch: Any, model: Any) -> Any:
        loss = model(**batch).loss
        return loss * torch.rand(1, device=loss.device) + torch.rand_like(loss)

    def waits(self, batch: Any, model: Any) -> Any:
        loss = model(**batch).loss
        return loss if loss.item() < 9 else loss / 2

    def writes(self, batch: Any, model: Any) -> Any:
        batch["file"].write("text")
        return model(**batch).loss

    def stores(self, batch: Any, model: Any) -> Any:
        keep = model.save_pretrained
        keep("folder")
        return model(**batch).loss

    def looks_up(self, batch: Any, model: Any) -> Any:
        return getattr(model, batch["method"])(batch)

    def passes_module(self, batch: Any, model: Any) -> Any:
        return model(time, **batch).loss


class Criterion(nn.Module):
    def __init__(self, weight: Any = None) -> None:
        super().__init__()
        self.calls, self.weight = 0, weight

    def forward(self, logits: Any) -> Any:
        self.calls += 1
        return logits.mean()


class Losses:
    """Steps with modules and tensors that are not part of the model."""

    def __init__(self) -> None:
        self.counting, self.head = Criterion(), nn.Linear(1, 1)
        self.temperature = nn.Parameter(torch.ones(()))
        self.center = torch.zeros(())

    def count(self, batch: Any, model: Any) -> Any:
        return self.counting(model(**batch).logits)

    def train_head(self, batch: Any, model: Any) -> Any:
        return self.head(model(**batch).logits).mean()

    def train_number(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss * self.temperature

    def move_center(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss - self.center.mul_(0.9)


class Child(Steps):
    def plain(self, batch: Any, model: Any) -> Any:
        return super().plain(batch, model)


def remember_calls(batch: Any, model: Any, calls: list[Any] = []) -> Any:  # noqa: B006
    calls.append(batch)
    return model(**batch).loss


def count_calls(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        print("called")
        return function(*args)

    return call


@count_calls
def decorated(batch: Any, model: Any) -> Any:
    return model(**batch).loss


@torch.autocast("cpu", enabled=False)
def under_autocast(batch: Any, model: Any) -> Any:
    print(batch)
    return model(**batch).loss


def make_closure(watch: Any) -> Any:
    def step(batch: Any, model: Any) -> Any:
        watch.begin()
        return model(**batch).loss

    return step


def examine(step: Any) -> Examination:
    return Examination([step], nn.Linear(1, 1))


def find_line(text: str) -> int:
    """The last line of this file with the text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return max(number for number, line in enumerate(lines, 1) if line.strip() == text)


@pytest.mark.parametrize("name", ["plain", "from_iterator", "draws_on_device"])
def test_a_step_that_only_computes(name: str) -> None:
    assert examine(getattr(Steps(), name)).effect is None
    assert examine(getattr(Child(), name)).effect is None


def test_values_outside_the_code_are_known() -> None:
    steps = Steps()
    examination = examine(steps.plain)
    before = examination.describe()
    assert {SCALE, 0.5} <= set(before[1])
    steps.factor = 0.25
    now = examination.describe()
    assert {SCALE, 0.25} <= set(now[1])
    assert examination.find_changing(before, now) == "self.factor"


@pytest.mark.parametrize(
    ("step", "effect", "line"),
    [
        (Steps().counts, "changes self.steps", "self.steps += 1"),
        (Steps().prints, "calls print()", None),
        (Steps().keeps, "uses self.history", "self.history.append(loss)"),
        (Steps().calls, "uses SEEN", "SEEN.append(loss)"),
        (Steps().marks, "changes model.is_marked", "model.is_marked = True"),
        (Steps().times, "calls time.time()", "return model(**batch).loss * time.time()"),
        (Steps().times_by_name, "calls get_time()", "return model(**batch).loss * get_time()"),
        (Steps().saves, "calls torch.save()", 'torch.save(batch, "batch.pt")'),
        (Steps().seeds, "calls torch.manual_seed()", "torch.manual_seed(0)"),
        (Steps().synchronizes, "calls torch.cuda.synchronize()", "torch.cuda.synchronize()"),
        (Steps().draws, "calls torch.rand() on the host", None),
        (Steps().chooses, "calls random.random()", None),
        (Steps().waits, "calls .item(), which waits for the GPU", None),
        (Steps().writes, "calls .write(), which is not known to compute only", None),
        (Steps().looks_up, "looks up an attribute by a computed name", None),
        (Steps().passes_module, "uses time", None),
        (make_closure(object()), "uses watch", "watch.begin()"),
        (remember_calls, "has a default argument that may change", None),
        (decorated, "calls print()", 'print("called")'),
        (under_autocast, "calls print()", None),
        (Losses().count, "changes self.calls", None),
        (Losses().train_head, "uses a Linear with trainable weights outside the model", None),
        (
            Losses().train_number,
            "uses self.temperature, a trainable weight outside the model",
            "return model(**batch).loss * self.temperature",
        ),
        (eval("lambda batch: batch"), "uses <lambda>, whose source is not there", None),
    ],
)
def test_a_step_that_does_more(step: Any, effect: str, line: str | None) -> None:
    found = examine(step).effect
    assert found is not None
    assert found.what == effect
    if line is not None:
        assert found.place is not None
        assert found.place.endswith(f"test_side_effects.py:{find_line(line)}")


def test_the_log_says_which_line_and_what_to_do() -> None:
    step = Steps().times
    line = find_line("return model(**batch).loss * time.time()")
    with pytest.raises(NotRepeatableError) as error:
        ReplayedCode([step], nn.Linear(1, 1)).check_effects()
    text = f"test_side_effects.py:{line} calls time.time() (a replay does not run Python code): "
    assert text + "move it into a callback (on_step_end)" in str(error)
    waits = examine(Steps().waits).effect
    assert "return the tensor as a part, (loss, n, {name: tensor})" in str(waits)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_model_of_your_own() -> None:
    assert Examination([], nn.Sequential(nn.Linear(2, 2))).effect is None
    found = Examination([], nn.Sequential(Counting(2, 2)))
    assert found.effect is not None
    assert found.effect.what == "changes self.calls"


@dataclasses.dataclass
class Output(ModelOutput):
    loss: Any = None
    logits: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    loss: Any
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)


class Pair(NamedTuple):
    loss: Any
    logits: Any = None


Triple = collections.namedtuple("Triple", "loss logits hidden", defaults=(None, None))


@dataclasses.dataclass
class Counted(Output):
    def __post_init__(self) -> None:
        SEEN.append(1.0)


class Printed(Pair):
    @property
    def total(self) -> Any:
        print(self.loss)
        return self.loss


@dataclasses.dataclass
class Made(Output):
    more: list[Any] = dataclasses.field(default_factory=lambda: SEEN)


@dataclasses.dataclass
class Config:
    weight: float = 0.1
    schedule: Any = None


def weigh(batch: Any, model: Any) -> Any:
    return model(**batch).loss * Config.weight


def schedule(batch: Any, model: Any) -> Any:
    return model(**batch).loss * Config.schedule.weight


def wrap(kind: type) -> Any:
    def step(batch: Any, model: Any) -> Any:
        return kind(model(**batch)).loss

    return step


def test_outputs_of_classes_of_your_own() -> None:
    """Dataclasses and named tuples, unless they have code of their own."""
    for kind in (Output, Frozen, Pair, Triple):
        assert examine(wrap(kind)).effect is None, kind
    for kind in (Counted, Printed, Made, Steps):
        assert str(examine(wrap(kind)).effect).partition(" (")[0].endswith(" uses kind"), kind


def test_a_dataclass_as_a_place_for_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine(weigh)
    assert found.effect is None
    before = found.describe()
    monkeypatch.setattr(Config, "weight", 0.2)
    assert found.find_changing(before, found.describe()) == "Config.weight"
    monkeypatch.setattr(Config, "schedule", Steps())
    assert "uses Config.schedule" in str(examine(schedule).effect)


class Measuring(nn.Linear):
    def compute_loss(self, batch: Any) -> Any:
        print(batch)
        return self(batch).mean()


class Computing(nn.Linear):
    def compute_loss(self, batch: Any) -> Any:
        return self(batch).mean()


def compute(batch: Any, model: Any) -> Any:
    return model.compute_loss(batch)


def test_a_method_of_the_model() -> None:
    assert Examination([compute], Computing(2, 2)).effect is None
    assert str(Examination([compute], Measuring(2, 2)).effect).count("calls print()") == 1


class Block(nn.Module):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_every_block_has_its_own_numbers() -> None:
    model = nn.Sequential(Block(), Block())
    found = Examination([], model)
    before = found.describe()
    model[0].scale = 2.0
    assert found.describe() != before


def test_numbers_of_a_librarys_modules() -> None:
    """A callback may change how attention is scaled, for example."""
    model = make_gpt2()
    found = Examination([], model)
    before = found.describe()
    model.transformer.h[0].attn.scaling = 0.125
    assert found.effect is None
    assert found.describe() != before


def make_gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_embd=4, n_layer=1, n_head=1, n_positions=4))


def test_a_forward_of_one_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].forward = Steps().prints
    assert "calls print()" in str(Examination([], model).effect)


def test_tensors_that_a_step_may_change() -> None:
    model, losses = nn.BatchNorm1d(1), Losses()
    found = Examination([losses.move_center], model)
    assert found.effect is None
    assert found.reads_tensors
    assert not examine(Steps().plain).reads_tensors
    tensors = found.list_tensors()
    assert len(tensors) == 4
    assert any(tensor is losses.center for tensor in tensors)


class WithHead(BertModel):
    """As users write it: a transformers model with a head, and a configuration that is read."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.hidden_size, config.num_labels)

    @torch.no_grad()
    def get_scale(self) -> Any:
        return torch.ones(()) / math.sqrt(self.config.hidden_size)

    def forward(self, input_ids: Any, labels: Any = None, **more: Any) -> Any:
        hidden = super().forward(input_ids, **more).last_hidden_state
        logits = self.head(hidden[:, 0]) * self.get_scale()
        return functional.cross_entropy(logits.view(-1, self.config.num_labels), labels), logits


def test_a_transformers_model_with_a_head_of_your_own() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    model = WithHead(BertConfig(intermediate_size=8, vocab_size=9, **sizes))
    found = Examination([Steps().plain], model)
    assert found.effect is None
    before = found.describe()
    model.config.num_labels = 7
    assert found.describe() != before, "its code reads the configuration"


def test_methods_of_a_model_that_do_more() -> None:
    assert "uses GPT2LMHeadModel.save_pretrained" in str(
        Examination([Steps().stores], make_gpt2()).effect
    )


_SIZES = {
    "num_hidden_layers": 1, "num_layers": 1, "n_layer": 1, "hidden_size": 16, "d_model": 16,
    "n_embd": 16, "num_attention_heads": 2, "num_heads": 2, "n_head": 2, "num_key_value_heads": 2,
    "intermediate_size": 16, "d_ff": 16, "d_kv": 8, "vocab_size": 50, "head_dim": 8,
    "encoder_layers": 1, "decoder_layers": 1, "image_size": 32, "patch_size": 16,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "ffn_dim": 16, "word_embed_proj_dim": 16, "num_local_experts": 2,
    "num_experts_per_tok": 1, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "family",
    [
        "bert", "roberta", "distilbert", "electra", "gpt2", "llama", "t5", "bart", "qwen2",
        "qwen3", "falcon", "vit", "mixtral", "mistral", "gemma2", "phi", "opt", "gpt_neox",
        "wav2vec2",
    ],
)  # fmt: skip
def test_models_of_transformers(family: str) -> None:
    """Refusing one of them would cost small models most of their speed."""
    config = AutoConfig.for_model(family)
    known = config.to_dict()
    for name, value in _SIZES.items():
        if name in known or name in (config.attribute_map or {}):
            setattr(config, name, value)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    assert Examination([Steps().plain], model).effect is None


class Losing(Trainer):
    def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


class Logging(Trainer):
    def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
        loss = super().compute_loss(model, inputs)
        self.log({"raw": loss})
        return loss


def test_losses_of_a_trainer() -> None:
    """``self.log`` in a loss would be left out by a replay."""
    step = Losing.__new__(Losing)
    assert Examination([step.training_step, step.compute_loss], nn.Linear(1, 1)).effect is None
    found = examine(Logging.__new__(Logging).compute_loss).effect
    assert found is not None
    assert found.place is not None
    line = find_line('self.log({"raw": loss})')
    assert found.place.endswith(f"test_side_effects.py:{line}")


class Forward(FlagAITrainer):
    def forward_step(self, data: Any, model: Any, mems: Any = None) -> Any:
        return {"loss": model(**data).loss}


class Printing(FlagAITrainer):
    def forward_step(self, data: Any, model: Any, mems: Any = None) -> Any:
        print("a step of FlagAI")
        return {"loss": model(**data).loss}


def test_a_step_that_our_own_code_calls() -> None:
    assert examine(Forward.__new__(Forward).run_training_step).effect is None
    line = find_line('print("a step of FlagAI")')
    found = examine(Printing.__new__(Printing).run_training_step).effect
    assert found is not None
    assert str(found.place).endswith(f":{line}")


def test_adapters() -> None:
    model = get_peft_model(make_gpt2(), LoraConfig(target_modules=["c_attn"]))
    assert Examination([Steps().plain], model).effect is None
