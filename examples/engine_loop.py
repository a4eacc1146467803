"""The engine in five lines: a plain PyTorch loop that runs on any number of devices.

rapidformer --user-script examples/engine_loop.py --pretrained-model-name-or-path bert-base-cased \
    --data-path glue --data-name mrpc --epochs 3 --micro-batch-size 16 --lr 2e-5 \
    --lr-warmup-iters 100 --mixed-precision

It also runs with ``torchrun``, ``python -m torch.distributed.launch`` or plain ``python``.
"""

from functools import partial

from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
)

from rapidformer import RapidformerEngine

engine = RapidformerEngine()
args = engine.args

tokenizer = AutoTokenizer.from_pretrained(args.pretrained_model_name_or_path)
datasets = load_dataset(args.data_path, args.data_name)


def tokenize_function(examples):
    return tokenizer(examples["sentence1"], examples["sentence2"], truncation=True, max_length=None)


tokenized_datasets = datasets.map(
    tokenize_function,
    batched=True,
    remove_columns=[
        name for name in datasets["train"].column_names if name in ("idx", "sentence1", "sentence2")
    ],
)
tokenized_datasets = tokenized_datasets.rename_column("label", "labels")


def collate_fn(examples):
    return tokenizer.pad(examples, padding="longest", return_tensors="pt")


train_dataloader = DataLoader(
    tokenized_datasets["train"],
    shuffle=True,
    collate_fn=collate_fn,
    batch_size=args.micro_batch_size,
)
eval_dataloader = DataLoader(
    tokenized_datasets["validation"],
    shuffle=False,
    collate_fn=collate_fn,
    batch_size=args.micro_batch_size,
)

model = AutoModelForSequenceClassification.from_pretrained(args.pretrained_model_name_or_path)
# transformers removed its own AdamW; torch's always behaves like correct_bias=True.
optimizer = AdamW(params=model.parameters(), lr=args.lr)

lr_scheduler = partial(
    get_linear_schedule_with_warmup,
    num_warmup_steps=args.lr_warmup_iters,
    num_training_steps=args.train_iters,
)

model, optimizer, lr_scheduler, train_dataloader, eval_dataloader = engine.compose(
    model=model,
    train_dataloader=train_dataloader,
    eval_dataloader=eval_dataloader,
    optimizer=optimizer,
    lr_scheduler_fn=lr_scheduler,
)

for epoch in range(args.epochs):
    model.train()
    for _step, batch in enumerate(train_dataloader):
        outputs = model(**batch)
        loss = outputs.loss
        engine.backward(loss)
        lr_scheduler.step()
        optimizer.step()
        optimizer.zero_grad()
    if engine.is_main:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
