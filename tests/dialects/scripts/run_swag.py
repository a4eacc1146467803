"""Multiple choice in the manner of transformers' examples."""
from itertools import chain

import numpy as np
from datasets import load_dataset
from transformers import AutoModelForMultipleChoice, AutoTokenizer, DataCollatorForMultipleChoice, HfArgumentParser

from rapidformer import Trainer, TrainingArguments

(training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
raw_datasets = load_dataset("json", data_files={"train": "swag.jsonl", "validation": "swag.jsonl"})
tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForMultipleChoice.from_pretrained("model")
ending_names = [f"ending{i}" for i in range(4)]


def preprocess_function(examples):
    first_sentences = [[context] * 4 for context in examples["sent1"]]
    second_sentences = [[examples[end][i] for end in ending_names] for i in range(len(first_sentences))]
    tokenized = tokenizer(list(chain(*first_sentences)), list(chain(*second_sentences)), truncation=True, max_length=32)
    return {k: [v[i : i + 4] for i in range(0, len(v), 4)] for k, v in tokenized.items()}


processed = raw_datasets.map(preprocess_function, batched=True)


def compute_metrics(eval_predictions):
    predictions, label_ids = eval_predictions
    preds = np.argmax(predictions, axis=1)
    return {"accuracy": (preds == label_ids).astype(np.float32).mean().item()}


trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=processed["train"],
    eval_dataset=processed["validation"],
    processing_class=tokenizer,
    data_collator=DataCollatorForMultipleChoice(tokenizer=tokenizer, return_tensors="pt"),
    compute_metrics=compute_metrics,
)
trainer.train()
trainer.save_metrics("eval", trainer.evaluate())
