"""Token classification in the manner of transformers' examples."""
import numpy as np
from datasets import load_dataset
from transformers import AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification
from transformers import HfArgumentParser

from rapidformer import Trainer, TrainingArguments, load_metric

(training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
raw_datasets = load_dataset("json", data_files={"train": "ner.jsonl", "validation": "ner.jsonl"})
label_list = ["O", "B-PER", "I-PER"]
label_to_id = {label: i for i, label in enumerate(label_list)}
tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForTokenClassification.from_pretrained("model", num_labels=len(label_list))


def tokenize_and_align_labels(examples):
    tokenized_inputs = tokenizer(examples["tokens"], truncation=True, is_split_into_words=True)
    labels = []
    for i, label in enumerate(examples["ner_tags"]):
        previous_word_idx = None
        label_ids = []
        for word_idx in tokenized_inputs.word_ids(batch_index=i):
            if word_idx is None or word_idx == previous_word_idx:
                label_ids.append(-100)
            else:
                label_ids.append(label_to_id[label[word_idx]])
            previous_word_idx = word_idx
        labels.append(label_ids)
    tokenized_inputs["labels"] = labels
    return tokenized_inputs


processed = raw_datasets.map(tokenize_and_align_labels, batched=True)
metric = load_metric("seqeval")


def compute_metrics(p):
    predictions, labels = p
    predictions = np.argmax(predictions, axis=2)
    true_predictions = [
        [label_list[p] for (p, l) in zip(prediction, label) if l != -100] for prediction, label in zip(predictions, labels)
    ]
    true_labels = [
        [label_list[l] for (p, l) in zip(prediction, label) if l != -100] for prediction, label in zip(predictions, labels)
    ]
    results = metric.compute(predictions=true_predictions, references=true_labels)
    return {"precision": results["overall_precision"], "f1": results["overall_f1"], "accuracy": results["overall_accuracy"]}


trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=processed["train"],
    eval_dataset=processed["validation"],
    processing_class=tokenizer,
    data_collator=DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=8 if training_args.fp16 else None),
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()
trainer.save_metrics("eval", metrics)
