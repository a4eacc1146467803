#!/bin/bash
# Instruction tuning without writing code: loss on the answers alone, several conversations per row.
# MODEL and DATA may be Hub names or local folders; DATA has a column of messages, or a prompt's and
# an answer's (docs/chat.md).

rapidformer --task causal_lm \
    --pretrained-model-name-or-path "${MODEL:-Qwen/Qwen2.5-0.5B}" \
    --data-path "${DATA:-HuggingFaceH4/no_robots}" \
    --seq-length 1024 \
    --packing \
    --epochs 2 \
    --micro-batch-size 4 \
    --global-batch-size 16 \
    --lr 2e-5 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.03 \
    --weight-decay 0 \
    --clip-grad 1.0 \
    --seed 42 \
    --mixed-precision \
    "$@"

# Then ask it something:
#   rapidformer predict --task causal_lm --load RUN --input '{"prompt": "What is a whale?"}'
