"""White box: fine-tune a Hugging Face model with the Finetuner template.

rapidformer --user-script examples/finetuner.py --task sequence_classification \
    --pretrained-model-name-or-path bert-base-cased --data-path glue --data-name mrpc \
    --epochs 3 --micro-batch-size 16 --global-batch-size 16 --lr 2e-5 --lr-decay-style linear \
    --lr-warmup-iters 100 --weight-decay 1e-2 --clip-grad 1.0 \
    --mixed-precision --zero-3-memory-optimization --onnx-runtime-training

The data needs the columns sentence1, sentence2 and label; a folder of JSON or CSV files works too:
``--data-path FOLDER``.
"""

import torch
from datasets import load_dataset
from metric import load_metric
from transformers import AutoTokenizer, BertForSequenceClassification

from rapidformer import Finetuner, RapidformerEngine, get_args


class MyFintuner(Finetuner):
    def __init__(self, engine):
        super().__init__(engine=engine)

    def train_valid_test_datasets_provider(self):
        args = get_args()
        tokenizer = AutoTokenizer.from_pretrained(args.pretrained_model_name_or_path)

        def tokenize_function(examples):
            # max_length=None => use the model max length (it's actually the default)
            return tokenizer(
                examples["sentence1"], examples["sentence2"], truncation=True, max_length=None
            )

        datasets = load_dataset(args.dataset_path, args.dataset_name)

        # Apply the method we just defined to all the examples in all the splits of the dataset
        columns = datasets["train"].column_names
        tokenized_datasets = datasets.map(
            tokenize_function,
            batched=True,
            remove_columns=[name for name in columns if name in ("idx", "sentence1", "sentence2")],
        )
        # `datasets` removed rename_column_, which changed the dataset in place.
        tokenized_datasets = tokenized_datasets.rename_column("label", "labels")

        train_dataset = tokenized_datasets["train"]
        valid_dataset = tokenized_datasets["validation"]
        test_dataset = tokenized_datasets["test"]

        def collate_fn(examples):
            return tokenizer.pad(examples, padding="longest", return_tensors="pt")

        return train_dataset, valid_dataset, test_dataset, collate_fn

    def model_optimizer_lr_scheduler_provider(self):
        args = get_args()
        model = BertForSequenceClassification.from_pretrained(args.load)
        return model, None, None

    def run_forward_step(self, batch, model):
        output_tensor = model(**batch)
        return output_tensor.loss

    # after each epoch run metric on eval dataset
    def run_compute_metrics(self, model, eval_dataloader):
        args = get_args()
        model = model[0]
        metric = load_metric(args.dataset_path, args.dataset_name)
        for _step, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)

            metric.add_batch(
                predictions=self.gather(predictions),
                references=self.gather(batch["labels"]),
            )

        return metric.compute()


if __name__ == "__main__":
    engine = RapidformerEngine()
    trainer = MyFintuner(engine=engine)
    trainer.train()
