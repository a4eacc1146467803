"""Question answering in the manner of transformers' examples: a Trainer of its own that turns
start and end logits into answers before they are scored."""
import numpy as np
from datasets import load_dataset
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, EvalPrediction, HfArgumentParser
from transformers import default_data_collator
from transformers.trainer_utils import speed_metrics
import time

from rapidformer import Trainer, TrainingArguments, load_metric


class QuestionAnsweringTrainer(Trainer):
    def __init__(self, *args, eval_examples=None, post_process_function=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function

    def evaluate(self, eval_dataset=None, eval_examples=None, ignore_keys=None, metric_key_prefix="eval"):
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        eval_dataloader = self.get_eval_dataloader(eval_dataset)
        eval_examples = self.eval_examples if eval_examples is None else eval_examples
        compute_metrics = self.compute_metrics
        self.compute_metrics = None
        start_time = time.time()
        try:
            output = self.evaluation_loop(
                eval_dataloader, description="Evaluation", prediction_loss_only=True if compute_metrics is None else None,
                ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix,
            )
        finally:
            self.compute_metrics = compute_metrics
        output.metrics.update(
            speed_metrics(metric_key_prefix, start_time, num_samples=output.num_samples, num_steps=1)
        )
        if self.post_process_function is not None and self.compute_metrics is not None and self.args.should_save:
            eval_preds = self.post_process_function(eval_examples, eval_dataset, output.predictions)
            metrics = self.compute_metrics(eval_preds)
            for key in list(metrics.keys()):
                if not key.startswith(f"{metric_key_prefix}_"):
                    metrics[f"{metric_key_prefix}_{key}"] = metrics.pop(key)
            metrics.update(output.metrics)
        else:
            metrics = output.metrics
        if self.args.should_log:
            self.log(metrics)
        return metrics


(training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
examples = load_dataset("json", data_files={"train": "qa.jsonl"})["train"]
tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForQuestionAnswering.from_pretrained("model")


def prepare(rows):
    inputs = tokenizer(rows["question"], rows["context"], truncation="only_second", max_length=32, padding="max_length")
    inputs["start_positions"] = [start for start in rows["start"]]
    inputs["end_positions"] = [start for start in rows["start"]]
    return inputs


features = examples.map(prepare, batched=True)
metric = load_metric("squad")


def post_processing_function(examples, features, predictions):
    starts = np.argmax(predictions[0], axis=1)
    formatted = [
        {"id": e["id"], "prediction_text": tokenizer.decode([f["input_ids"][s]])}
        for e, f, s in zip(examples, features, starts)
    ]
    references = [{"id": e["id"], "answers": e["answers"]} for e in examples]
    return EvalPrediction(predictions=formatted, label_ids=references)


trainer = QuestionAnsweringTrainer(
    model=model,
    args=training_args,
    train_dataset=features,
    eval_dataset=features,
    eval_examples=examples,
    processing_class=tokenizer,
    data_collator=default_data_collator,
    post_process_function=post_processing_function,
    compute_metrics=lambda p: metric.compute(predictions=p.predictions, references=p.label_ids),
)
trainer.train()
metrics = trainer.evaluate()
trainer.save_metrics("eval", metrics)
