"""``rapidformer verify`` on a black-box run and on scripts: table, verdict and exit status.

The runs of a verification are forked from the test's process, where torch is imported already;
one test starts the command, and what it starts in turn, for real.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.cli.verify_table import read_table

SCRIPT = """
import torch
from torch import nn

from rapidformer import Finetuner, RapidformerEngine


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 5)

    def forward(self, inputs, labels):
        for layer in self.layers:
            inputs = self.drop(torch.tanh(layer(inputs)))
        losses = nn.functional.cross_entropy(self.head(inputs), labels, reduction="none")
        return losses.mean()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"inputs": torch.randn(8, generator=generator), "labels": index % 5}


class Trainer(Finetuner):
    def train_valid_test_datasets_provider(self):
        return Rows(), None, None, None

    def model_optimizer_lr_scheduler_provider(self):
        model = Model()
        return model, torch.optim.SGD(model.parameters(), lr=0.1), None

    def run_forward_step(self, batch, model):
        FORWARD


engine = RapidformerEngine()
trainer = Trainer(engine)
FAULT
trainer.train()
"""


def write_script(folder: Path, *, forward: str = "return model(**batch)", fault: str = "") -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT.replace("FORWARD", forward).replace("FAULT", fault))
    return path


def test_a_script_whose_switches_change_nothing(verify: Any, tmp_path: Path) -> None:
    """Its dropout is switched off, or the processes would differ."""
    script = write_script(tmp_path)
    status, out, err = verify(
        "--user-script", script, "--nproc-per-node", 2, "--micro-batch-size", 4, "--epochs", 1,
        "--bf16", "--save", tmp_path / "run",
    )  # fmt: skip
    assert status == 0, out + err
    table = read_table(out)
    for quantity in ("loss", "gradient norm", "gradients", "updated weights"):
        assert " pass" in table[quantity]
    assert out.strip().endswith("equal: these switches change nothing.")
    assert "data parallelism over 2" in err
    assert "left out --bf16: precision changes the numbers by design" in err
    assert "Model, 261 parameters, fp32 on cpu; 3 steps of 8 rows" in err
    assert verify.kinds == ["switched", "whole"]
    assert not (tmp_path / "run").exists(), "nothing is left behind"


def test_a_wrong_gradient_is_named(verify: Any, tmp_path: Path) -> None:
    fault = """
class Doubled(Model):
    def __init__(self):
        super().__init__()
        if engine.args.world_size > 1:
            self.layers[1].weight.register_hook(lambda gradient: 2 * gradient)
_, Model = Model, Doubled
"""
    script = write_script(tmp_path, fault=fault)
    status, out, err = verify(
        "--user-script", script, "--nproc-per-node", 2, "--micro-batch-size", 4, "--epochs", 1,
        "--verify-steps", 2,
    )  # fmt: skip
    assert status == 3, out + err
    table = read_table(out)
    assert " pass" in table["starting weights"]
    assert " FAIL" in table["gradients"] and "layers.1.weight, step 1" in table["gradients"]
    assert "first parameter that differs: layers.1.weight, its gradient by 1.0e+00" in out
    assert "alone" in out
    assert out.strip().endswith("different: these switches change the result.")
    assert verify.kinds == ["switched", "whole", "disturbed"]


def test_a_random_forward_step_is_not_blamed_on_the_switches(verify: Any, tmp_path: Path) -> None:
    forward = """inputs = batch["inputs"] + torch.randn_like(batch["inputs"])
        return model(inputs, batch["labels"])"""
    script = write_script(tmp_path, forward=forward)
    status, out, err = verify(
        "--user-script", script, "--nproc-per-node", 2, "--micro-batch-size", 4, "--epochs", 1
    )
    assert status == 4, out + err
    assert "undecided: one process with other random numbers gives a different result too" in out


def test_a_loss_with_a_wrong_count_is_distinguished_from_a_wrong_switch(
    verify: Any, tmp_path: Path
) -> None:
    """A sum that is said to be a mean: the smaller the pieces, the smaller the gradient."""
    script = write_script(tmp_path, forward="return model(**batch) * len(batch['labels'])")
    status, out, err = verify(
        "--user-script", script, "--nproc-per-node", 2, "--micro-batch-size", 2, "--epochs", 1
    )
    assert status == 3, out + err
    assert "different, but not because of the switches" in out
    status, out, _ = verify(
        "--user-script", script, "--nproc-per-node", 2, "--micro-batch-size", 2, "--epochs", 1,
        "--same-micro-batches",
    )  # fmt: skip
    assert status == 0, out


def test_flags_that_split_nothing_are_refused(command: Any, tmp_path: Path) -> None:
    done = command("verify", "--user-script", write_script(tmp_path), "--verify-steps", 0)
    assert done.returncode == 1
    assert "--verify-steps must be at least 1, got 0" in done.stderr
    done = command("verify", "--user-script", write_script(tmp_path))
    assert done.returncode == 1
    assert "nothing to verify: these flags neither split anything" in done.stderr
    done = command("verify", "--tensor-model-parallel-size", 2)
    assert "nothing to verify: give the flags of a run" in done.stderr
    assert "--verify-steps N" in command("verify", "--help").stdout


def make_language_model(folder: Path) -> Path:
    """A Llama of 6 layers, hidden size 128, with a tokenizer of words."""
    words = {f"w{i}": i + 1 for i in range(60)} | {"[PAD]": 0}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(folder)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61, hidden_size=128, intermediate_size=256, num_hidden_layers=6,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    ).save_pretrained(folder)  # fmt: skip
    dice = random.Random(0)
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(60):
            text = " ".join(f"w{dice.randrange(60)}" for _ in range(dice.randrange(4, 30)))
            file.write(json.dumps({"text": text}) + "\n")
    return folder


def test_the_command_on_a_black_box_run(rapidformer: Any, tmp_path: Path) -> None:
    """For real: a reduced copy, in the fewest processes that the switches need."""
    folder = make_language_model(tmp_path / "model")
    done = rapidformer(
        "verify", "--task", "causal_lm", "--pretrained-model-name-or-path", folder,
        "--train-data", folder / "train.jsonl", "--seq-length", 32, "--lr", 1e-3,
        "--tensor-model-parallel-size", 2, "--mixed-precision", "--device", "cpu",
        "--no-group-texts", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "running  2 processes" in done.stderr
    assert "left out --mixed-precision" in done.stderr
    # 2 layers of 6, heads 8 wide: 32, not 128.
    assert "LlamaForCausalLM, 34,784 parameters" in done.stderr, done.stderr
    table = read_table(done.stdout)
    assert " pass" in table["gradients"] and "FAIL" not in done.stdout
