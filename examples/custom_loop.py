"""White box without a template: your own Hugging Face loop, with a few lines changed.

Lines marked ``+`` are added to a plain PyTorch script, lines marked ``-`` are removed.

rapidformer --user-script examples/custom_loop.py --pretrained-model-name-or-path bert-base-cased \
    --data-path glue --data-name mrpc --epochs 3 --micro-batch-size 16 --lr 2e-5 \
    --lr-warmup-iters 100 --zero-1-memory-optimization
"""

from functools import partial

import torch
from datasets import load_dataset
from metric import load_metric
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
)

from rapidformer import Finetuner, RapidformerEngine, get_args  # +

engine = RapidformerEngine()  # +
finetuner = Finetuner(engine=engine)  # +
args = get_args()  # +

tokenizer = AutoTokenizer.from_pretrained(args.pretrained_model_name_or_path)
datasets = load_dataset(args.data_path, args.data_name)
metric = load_metric(args.data_path, args.data_name)


def tokenize_function(examples):
    # max_length=None => use the model max length (it's actually the default)
    return tokenizer(examples["sentence1"], examples["sentence2"], truncation=True, max_length=None)


tokenized_datasets = datasets.map(
    tokenize_function,
    batched=True,
    remove_columns=[
        name for name in datasets["train"].column_names if name in ("idx", "sentence1", "sentence2")
    ],
)

# - train_dataloader = DataLoader(tokenized_datasets["train"])
# - eval_dataloader = DataLoader(tokenized_datasets["train"])
train_dataloader = finetuner.build_data_loader(tokenized_datasets["train"])  # +
eval_dataloader = finetuner.build_data_loader(tokenized_datasets["validation"])  # +

model = AutoModelForSequenceClassification.from_pretrained(
    args.pretrained_model_name_or_path, return_dict=True
)

# - optimizer = AdamW(params=model.parameters(), lr=args.lr, correct_bias=True)
# - lr_scheduler = get_linear_schedule_with_warmup(
# -     optimizer=optimizer,
# -     num_warmup_steps=args.lr_warmup_iters,
# -     num_training_steps=args.train_iters,
# - )
lr_scheduler = partial(  # +
    get_linear_schedule_with_warmup,
    num_warmup_steps=args.lr_warmup_iters,
    num_training_steps=args.train_iters,
)
model, optimizer, lr_scheduler = engine.compose(  # +
    model_obj=model, lr_scheduler_fn=lr_scheduler
)

# - device = torch.device("cuda", args.local_rank)
for epoch in range(args.epochs):
    model.train()
    for _step, batch in enumerate(train_dataloader):
        # - batch.to(device)
        outputs = model(**batch)
        loss = outputs.loss
        engine.backward(loss)  # + instead of loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()

    model.eval()
    for _step, batch in enumerate(eval_dataloader):
        # - batch.to(device)
        with torch.no_grad():
            outputs = model(**batch)
        predictions = outputs.logits.argmax(dim=-1)
        metric.add_batch(
            predictions=engine.gather(predictions), references=engine.gather(batch["labels"])
        )

    eval_metric = metric.compute()
    if engine.is_main:
        print(f"epoch {epoch}: {eval_metric}")
