"""Causal and masked language modelling in the manner of transformers' examples."""
import math
import sys
from itertools import chain

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling
from transformers import HfArgumentParser, default_data_collator

from rapidformer import Trainer, TrainingArguments, load_metric

is_masked = sys.argv.pop(1) == "masked"
(training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
raw_datasets = load_dataset("text", data_files={"train": "corpus.txt", "validation": "corpus.txt"})
tokenizer = AutoTokenizer.from_pretrained("model")
if is_masked:
    model = AutoModelForMaskedLM.from_pretrained("model")
else:
    model = AutoModelForCausalLM.from_pretrained("gpt2")
block_size = 16

tokenized = raw_datasets.map(lambda rows: tokenizer(rows["text"], return_token_type_ids=False), batched=True, remove_columns=["text"])


def group_texts(examples):
    concatenated = {k: list(chain(*examples[k])) for k in examples.keys()}
    total_length = len(concatenated["input_ids"]) // block_size * block_size
    result = {k: [t[i : i + block_size] for i in range(0, total_length, block_size)] for k, t in concatenated.items()}
    result["labels"] = result["input_ids"].copy()
    return result


lm_datasets = tokenized.map(group_texts, batched=True)


def preprocess_logits_for_metrics(logits, labels):
    if isinstance(logits, tuple):
        logits = logits[0]
    return logits.argmax(dim=-1)


metric = load_metric("accuracy")


def compute_metrics(eval_preds):
    preds, labels = eval_preds
    if is_masked:
        labels, preds = labels.reshape(-1), preds.reshape(-1)
        mask = labels != -100
        labels, preds = labels[mask], preds[mask]
    else:
        labels, preds = labels[:, 1:].reshape(-1), preds[:, :-1].reshape(-1)
    return metric.compute(predictions=preds, references=labels)


trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=lm_datasets["train"],
    eval_dataset=lm_datasets["validation"],
    processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3) if is_masked else default_data_collator,
    compute_metrics=compute_metrics,
    preprocess_logits_for_metrics=preprocess_logits_for_metrics,
)
train_result = trainer.train()
trainer.save_model()
metrics = trainer.evaluate()
metrics["perplexity"] = math.exp(metrics["eval_loss"])
trainer.log_metrics("eval", metrics)
trainer.save_metrics("eval", metrics)
