"""``torch.save(model)`` of a composed model: the plain model, for a process without an engine."""

from __future__ import annotations

import copy
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer import RapidformerEngine
from rapidformer.overlay import FACTS, list_layers
from tests.dialects.small import collate, make_classifier, make_rows

READ = """
import sys, torch
for name in [name for name in sys.modules if name.partition(".")[0] == "rapidformer"]:
    del sys.modules[name]
sys.modules["rapidformer"] = None  # importing it, or anything in it, fails
model = torch.load(sys.argv[1], weights_only=False)
print(sum(p.double().sum().item() for p in model.parameters()))
"""


def compose(model: Any, **args: Any) -> RapidformerEngine:
    engine = RapidformerEngine(args={"log_level": "error", **args})
    engine.compose(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return engine


def see(module: Any, args: Any, output: Any) -> None:
    """A hook of the user's."""


def test_the_file_holds_the_plain_model(tmp_path: Path) -> None:
    model = make_classifier()
    model.bert.register_forward_hook(see)
    engine = compose(model)
    engine.backward(model(**collate(make_rows(4))).loss)
    engine.step()
    layers = list_layers(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for module in loaded.modules():
        assert not list_layers(module) and FACTS not in vars(module)
        hooks = list(module._forward_hooks.values()) + list(module._forward_pre_hooks.values())
        assert hooks == [see] * (module is loaded.bert)
    expected = {**vars(make_classifier().config), "problem_type": model.config.problem_type}
    assert vars(loaded.config) == expected
    assert list(loaded.state_dict()) == list(model.state_dict())
    batch = collate(make_rows(4, seed=1))
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits)
    assert list_layers(model) == layers == list_layers(copy.deepcopy(model))


def test_it_is_read_without_rapidformer(python: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=40))
    engine = compose(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    command = [python, "-c", READ, str(tmp_path / "model.pt")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    total = sum(p.double().sum().item() for p in model.parameters())
    assert float(output) == pytest.approx(total)
    engine.close()
    assert pickle.loads(pickle.dumps(model)).config.n_layer == 1


def test_a_copy_cannot_be_pickled_and_says_so(tmp_path: Path) -> None:
    model = make_classifier()
    compose(model)
    with pytest.raises(pickle.PicklingError, match=r"Save its state_dict\(\)"):
        torch.save(copy.deepcopy(model), tmp_path / "model.pt")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol(protocol: int) -> None:
    model = make_classifier()
    compose(model)
    loaded = pickle.loads(pickle.dumps(model, protocol=protocol))
    assert not any(map(list_layers, loaded.modules()))
    assert list(loaded.state_dict()) == list(model.state_dict())


def test_a_flat_copy_shares_its_modules() -> None:
    model = make_classifier()
    compose(model)
    twin = copy.copy(model)
    assert twin.bert is model.bert
    assert list_layers(twin) == list_layers(model)


def test_a_part_cannot_be_pickled_and_says_so() -> None:
    model = make_classifier()
    engine = compose(model)
    for part in (model.bert, model.bert.encoder, model.bert.encoder.layer[0]):
        with pytest.raises(pickle.PicklingError, match=r"is a part of a model .* after engine\.cl"):
            pickle.dumps(part)
        twin = copy.deepcopy(part)
        assert list_layers(twin) == list_layers(part)
        assert not {*map(id, twin.parameters())} & {*map(id, part.parameters())}
    pickle.dumps(model.bert.embeddings)
    engine.close()
    pickle.dumps(model.bert)


@pytest.mark.parametrize("labels", [False, True])
def test_what_is_exported_is_the_plain_model(labels: bool) -> None:
    model, batch = make_classifier().eval(), collate(make_rows(4))
    if not labels:
        del batch["labels"]
    expected = model(**batch).logits
    engine = compose(model)
    exported = torch.export.export(model, (), batch).module()
    torch.testing.assert_close(exported(**batch).logits, expected)
    engine.close()
    # torch.export gives modules new lists and dictionaries: closing finds what it has to undo.
    assert not any(list_layers(module) or FACTS in vars(module) for module in model.modules())
    pickle.dumps(model)
