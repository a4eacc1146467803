"""Text classification in the manner of transformers' examples."""
import logging
import os
import sys
from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding
from transformers import EvalPrediction, HfArgumentParser, default_data_collator, set_seed
from transformers.trainer_utils import get_last_checkpoint

from rapidformer import Trainer, TrainingArguments, load_metric

logger = logging.getLogger(__name__)


@dataclass
class DataTrainingArguments:
    train_file: str = field(default=None)
    validation_file: str = field(default=None)
    max_seq_length: int = field(default=32)
    pad_to_max_length: bool = field(default=True)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(default=None)


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)], level=training_args.get_process_log_level())
    logger.warning(
        f"Process rank: {training_args.local_process_index}, device: {training_args.device}, n_gpu: {training_args.n_gpu}, "
        + f"distributed training: {training_args.parallel_mode.value == 'distributed'}, 16-bits training: {training_args.fp16}"
    )
    set_seed(training_args.seed)
    raw_datasets = load_dataset(
        "json", data_files={"train": data_args.train_file, "validation": data_args.validation_file}
    )
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(model_args.model_name_or_path, config=config)
    padding = "max_length" if data_args.pad_to_max_length else False

    def preprocess_function(examples):
        return tokenizer(
            examples["sentence1"], examples["sentence2"], padding=padding, max_length=data_args.max_seq_length, truncation=True
        )

    with training_args.main_process_first(desc="dataset map pre-processing"):
        raw_datasets = raw_datasets.map(preprocess_function, batched=True)
    train_dataset, eval_dataset = raw_datasets["train"], raw_datasets["validation"]
    metric = load_metric("accuracy")

    def compute_metrics(p: EvalPrediction):
        preds = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
        return metric.compute(predictions=np.argmax(preds, axis=1), references=p.label_ids)

    data_collator = default_data_collator if data_args.pad_to_max_length else DataCollatorWithPadding(tokenizer)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=data_collator,
    )
    if training_args.do_train:
        checkpoint = None
        if training_args.resume_from_checkpoint is not None:
            checkpoint = training_args.resume_from_checkpoint
        elif os.path.isdir(training_args.output_dir):
            checkpoint = get_last_checkpoint(training_args.output_dir)
        train_result = trainer.train(resume_from_checkpoint=checkpoint)
        metrics = train_result.metrics
        metrics["train_samples"] = len(train_dataset)
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate(eval_dataset=eval_dataset)
        metrics["eval_samples"] = len(eval_dataset)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if training_args.do_predict:
        predict_dataset = eval_dataset.remove_columns("label")
        predictions = trainer.predict(predict_dataset, metric_key_prefix="predict").predictions
        np.savetxt(f"{training_args.output_dir}/predict_results.txt", np.argmax(predictions, axis=1), fmt="%d")
    trainer.create_model_card(finetuned_from=model_args.model_name_or_path, tasks="text-classification")


if __name__ == "__main__":
    main()
