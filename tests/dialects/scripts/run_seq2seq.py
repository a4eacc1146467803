"""Summarisation and translation in the manner of transformers' examples."""
import sys

import numpy as np
from datasets import load_dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, HfArgumentParser

from rapidformer import Seq2SeqTrainer, Seq2SeqTrainingArguments, load_metric

task = sys.argv.pop(1)
(training_args,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses()
raw_datasets = load_dataset("json", data_files={"train": "pairs.jsonl", "validation": "pairs.jsonl"})
tokenizer = AutoTokenizer.from_pretrained("t5")
model = AutoModelForSeq2SeqLM.from_pretrained("t5")
prefix = "w1 " if task == "summarization" else ""


def preprocess_function(examples):
    model_inputs = tokenizer([prefix + text for text in examples["source"]], max_length=16, truncation=True)
    labels = tokenizer(text_target=examples["target"], max_length=8, truncation=True)
    model_inputs["labels"] = labels["input_ids"]
    return model_inputs


processed = raw_datasets.map(preprocess_function, batched=True)
metric = load_metric("rouge" if task == "summarization" else "sacrebleu")


def compute_metrics(eval_preds):
    preds, labels = eval_preds
    preds = np.where(preds != -100, preds, tokenizer.pad_token_id)
    labels = np.where(labels != -100, labels, tokenizer.pad_token_id)
    decoded_preds = [text.strip() for text in tokenizer.batch_decode(preds, skip_special_tokens=True)]
    decoded_labels = [text.strip() for text in tokenizer.batch_decode(labels, skip_special_tokens=True)]
    if task == "translation":
        result = {"bleu": metric.compute(predictions=decoded_preds, references=[[t] for t in decoded_labels])["score"]}
    else:
        result = {k: round(v * 100, 4) for k, v in metric.compute(predictions=decoded_preds, references=decoded_labels).items()}
    result["gen_len"] = np.mean([np.count_nonzero(pred != tokenizer.pad_token_id) for pred in preds])
    return result


trainer = Seq2SeqTrainer(
    model=model,
    args=training_args,
    train_dataset=processed["train"],
    eval_dataset=processed["validation"],
    processing_class=tokenizer,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
    compute_metrics=compute_metrics if training_args.predict_with_generate else None,
)
trainer.train()
metrics = trainer.evaluate(max_length=8, num_beams=2, metric_key_prefix="eval")
trainer.save_metrics("eval", metrics)
predict_results = trainer.predict(processed["validation"], metric_key_prefix="predict", max_length=8, num_beams=1)
trainer.save_metrics("predict", predict_results.metrics)
