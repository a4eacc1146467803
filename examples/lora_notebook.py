"""The example `lora.sh` in cells: open it as a notebook, or run it with python.

MODEL, TRAIN and EVAL are environment variables here; in a notebook, write names or paths.
"""

# %% Three lines: chat data in, adapters in `run/last`, and how good they are
import os

from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

from rapidformer.dialects.mindformers import Trainer, TrainingArguments

if missing := [name for name in ("MODEL", "TRAIN", "EVAL") if name not in os.environ]:
    raise SystemExit(
        f"{', '.join(missing)} not set. Give a model and two files of chat data: MODEL=Qwen/"
        "Qwen2.5-0.5B TRAIN=train.jsonl EVAL=test.jsonl python examples/lora_notebook.py"
    )
model, train, test = (os.environ[name] for name in ("MODEL", "TRAIN", "EVAL"))
arguments = TrainingArguments(
    output_dir="run", num_train_epochs=2, batch_size=4, learning_rate=2e-4, sink_size=10
)

trainer = Trainer(arguments, "text_generation", model, None, train, test, pet_method="lora")
trainer.finetune()
print(trainer.evaluate())

# %% Merge: plain peft reads the run's adapter
merged = AutoPeftModelForCausalLM.from_pretrained("run/last").merge_and_unload()
merged.save_pretrained("merged")
AutoTokenizer.from_pretrained("run/last").save_pretrained("merged")

# %% Generate with the merged model
print(trainer.predict("merged", input_data="who runs ?", max_new_tokens=8))
