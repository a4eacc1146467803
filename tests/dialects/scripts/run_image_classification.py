"""Image classification in the manner of transformers' examples."""
import numpy as np
import torch
from datasets import load_dataset
from transformers import AutoModelForImageClassification, HfArgumentParser
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from rapidformer import Trainer, TrainingArguments, load_metric

(training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
dataset = load_dataset("imagefolder", data_dir="images")
labels = dataset["train"].features["label"].names
image_processor = ViTImageProcessorPil.from_pretrained("vit")
model = AutoModelForImageClassification.from_pretrained(
    "vit", num_labels=len(labels), id2label=dict(enumerate(labels)), ignore_mismatched_sizes=True
)
metric = load_metric("accuracy")


def compute_metrics(p):
    return metric.compute(predictions=np.argmax(p.predictions, axis=1), references=p.label_ids)


def collate_fn(examples):
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    return {"pixel_values": pixel_values, "labels": torch.tensor([example["label"] for example in examples])}


def transforms(example_batch):
    images = [image.convert("RGB") for image in example_batch["image"]]
    example_batch["pixel_values"] = list(image_processor(images, return_tensors="pt")["pixel_values"])
    return example_batch


dataset["train"].set_transform(transforms)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["train"],
    compute_metrics=compute_metrics,
    processing_class=image_processor,
    data_collator=collate_fn,
)
trainer.train()
trainer.save_metrics("eval", trainer.evaluate())
