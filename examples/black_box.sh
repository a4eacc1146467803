#!/bin/bash
# Black box: fine-tune without writing code. MODEL and DATA may be Hub names or local folders.
export MASTER_ADDR=localhost
export MASTER_PORT=6010
export NNODES=1
export NODE_RANK=0

rapidformer --task sequence_classification \
    --pretrained-model-name-or-path "${MODEL:-bert-base-cased}" \
    --data-path "${DATA:-glue}" \
    ${DATA_NAME:+--data-name "$DATA_NAME"} \
    --epochs 3 \
    --micro-batch-size 16 \
    --global-batch-size 64 \
    --lr 2e-5 \
    --lr-decay-style linear \
    --lr-warmup-iters 100 \
    --weight-decay 1e-2 \
    --clip-grad 1.0 \
    --seed 42 \
    --mixed-precision \
    --onnx-runtime-training \
    --zero-1-memory-optimization \
    "$@"
