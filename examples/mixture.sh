#!/bin/bash
# Fine-tuning on several data sets without writing code: weights, columns and caps are in a YAML list
# (docs/mixtures.md). The loss and the metrics of each set are in the log and in metrics.jsonl.

rapidformer --task sequence_classification \
    --pretrained-model-name-or-path "${MODEL:-bert-base-uncased}" \
    --data-path "${MIXTURE:-$(dirname "$0")/mixture.yaml}" \
    --data-stopping first \
    --seq-length 64 \
    --epochs 1 \
    --micro-batch-size 16 \
    --lr 3e-5 \
    --seed 42 \
    "$@"
