"""Saving in the background from a GPU: the copies in page-locked memory, reserved ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rapidformer.checkpoint.tensors import StoredTensors
from rapidformer.engine import RapidformerEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("is_reserved", [False, True], ids=["at the save", "ahead"])
def test_what_is_written_is_the_state_of_its_step(is_reserved: bool, tmp_path: Path) -> None:
    engine = RapidformerEngine(args={"lr": 0.1, "async_save": "on", "log_level": "error"})
    # The first weight has pages of its own, the second one shares them with other tensors.
    model = nn.Sequential(nn.Linear(1024, 8192), nn.Linear(8192, 1))
    (model, optimizer, *_) = engine.compose(model)
    for step in (1, 2):  # the second save uses the memory of the first
        engine.backward(model(torch.ones(2, 1024, device=engine.device)).square().mean())
        optimizer.step()
        if is_reserved and step == 1:
            engine.checkpoints.prepare_saves()
        expected = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        engine.save_checkpoint(tmp_path, wait=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)  # training continues
        engine.checkpoints.wait_for_save()
        stored = StoredTensors(tmp_path / f"iter_{step:07d}" / "state")
        for name, value in expected.items():
            assert torch.equal(stored.read(f"model.{name}"), value), (step, name)
            model.state_dict()[name].copy_(value)
