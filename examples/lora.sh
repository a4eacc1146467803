#!/bin/bash
# A chat model with LoRA, from data to answers: train, evaluate, merge, generate. Only the adapters
# are trained, and RUN/best is a folder that plain peft loads too (docs/lora.md).
# MODEL and DATA may be Hub names or local folders. Further flags go to the training.
set -e
RUN="${RUN:-runs/lora}"

rapidformer --task causal_lm \
    --pretrained-model-name-or-path "${MODEL:-Qwen/Qwen2.5-0.5B}" \
    --data-path "${DATA:-HuggingFaceH4/no_robots}" \
    --validation-split 0.1 \
    --seq-length 1024 \
    --lora-rank 16 \
    --lora-target-modules all-linear \
    --epochs 2 \
    --micro-batch-size 4 \
    --lr 2e-4 \
    --lr-decay-style cosine \
    --weight-decay 0 \
    --mixed-precision \
    --save "$RUN" \
    "$@"

rapidformer evaluate --load "$RUN" --output "$RUN/evaluation.json"

rapidformer export "$RUN" "$RUN/merged"

rapidformer predict --task causal_lm --load "$RUN/merged" \
    --input "${QUESTION:-What is a whale?}" \
    --max-new-tokens 40
