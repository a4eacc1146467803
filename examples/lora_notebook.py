"""The example `lora.sh` in cells: open it as a notebook, or run it with python.

MODEL, TRAIN and EVAL are environment variables here; in a notebook, write names or paths.
"""

# %% Two calls: chat data in, adapters in `run/best`, and how good they are
import os

import rapidformer

if missing := [name for name in ("MODEL", "TRAIN", "EVAL") if name not in os.environ]:
    raise SystemExit(
        f"{', '.join(missing)} not set. Give a model and two files of chat data: MODEL=Qwen/"
        "Qwen2.5-0.5B TRAIN=train.jsonl EVAL=test.jsonl python examples/lora_notebook.py"
    )
model, train, test = (os.environ[name] for name in ("MODEL", "TRAIN", "EVAL"))

rapidformer.train(
    task="causal_lm", pretrained_model_name_or_path=model, train_data=[train], valid_data=[test],
    lora_rank=8, epochs=2, micro_batch_size=4, lr=2e-4, save="run", overwrite=True,
)  # fmt: skip
print(rapidformer.evaluate(load="run"))

# %% Merge the adapter into the model, and prove that plain transformers computes the same
rapidformer.export("run", "merged")

# %% Generate with the merged model
print(rapidformer.predict("who runs ?", load="merged", max_new_tokens=8))
