"""Translation in the manner of transformers' examples, with a training loop of its own."""
import argparse
import json
import os

import numpy as np
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, get_scheduler

from rapidformer import Accelerator, load_metric, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--train_file", type=str, default="pairs.jsonl")
parser.add_argument("--model_name_or_path", type=str, default="t5")
parser.add_argument("--per_device_train_batch_size", type=int, default=4)
parser.add_argument("--per_device_eval_batch_size", type=int, default=4)
parser.add_argument("--num_train_epochs", type=int, default=1)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--max_target_length", type=int, default=8)
parser.add_argument("--output_dir", type=str, default="translated")
args = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
set_seed(42)
raw_datasets = load_dataset("json", data_files={"train": args.train_file, "validation": args.train_file})
tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
model = AutoModelForSeq2SeqLM.from_pretrained(args.model_name_or_path)


def preprocess_function(examples):
    model_inputs = tokenizer(examples["source"], max_length=16, truncation=True)
    labels = tokenizer(text_target=examples["target"], max_length=args.max_target_length, truncation=True)
    model_inputs["labels"] = labels["input_ids"]
    return model_inputs


with accelerator.main_process_first():
    processed = raw_datasets.map(preprocess_function, batched=True, remove_columns=["source", "target"])
data_collator = DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100)
train_dataloader = DataLoader(
    processed["train"], shuffle=True, collate_fn=data_collator, batch_size=args.per_device_train_batch_size
)
eval_dataloader = DataLoader(
    processed["validation"], collate_fn=data_collator, batch_size=args.per_device_eval_batch_size
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=len(train_dataloader))
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
metric = load_metric("sacrebleu")


def postprocess_text(preds, labels):
    return [pred.strip() for pred in preds], [[label.strip()] for label in labels]


completed_steps = 0
for epoch in range(args.num_train_epochs):
    model.train()
    for batch in train_dataloader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            completed_steps += 1

    model.eval()
    for batch in eval_dataloader:
        with torch.no_grad():
            generated_tokens = accelerator.unwrap_model(model).generate(
                batch["input_ids"], attention_mask=batch["attention_mask"], max_length=args.max_target_length
            )
            generated_tokens = accelerator.pad_across_processes(
                generated_tokens, dim=1, pad_index=tokenizer.pad_token_id
            )
            labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=tokenizer.pad_token_id)
            generated_tokens = accelerator.gather(generated_tokens).cpu().numpy()
            labels = accelerator.gather(labels).cpu().numpy()
            labels = np.where(labels != -100, labels, tokenizer.pad_token_id)
            decoded_preds = tokenizer.batch_decode(generated_tokens, skip_special_tokens=True)
            decoded_labels = tokenizer.batch_decode(labels, skip_special_tokens=True)
            decoded_preds, decoded_labels = postprocess_text(decoded_preds, decoded_labels)
            metric.add_batch(predictions=decoded_preds, references=decoded_labels)
    eval_metric = metric.compute()
    accelerator.print({"bleu": eval_metric["score"]})

accelerator.wait_for_everyone()
unwrapped_model = accelerator.unwrap_model(model)
unwrapped_model.save_pretrained(
    args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
)
if accelerator.is_main_process:
    tokenizer.save_pretrained(args.output_dir)
    with open(os.path.join(args.output_dir, "all_results.json"), "w") as f:
        json.dump({"eval_bleu": eval_metric["score"]}, f)
accelerator.end_training()
