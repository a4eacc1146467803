#!/bin/bash
# Learn from a reward function without writing code: a model that knows nothing learns to copy a
# digit, in half a minute on a CPU. With MODEL, DATA (a column `prompt` and any others) and REWARD
# (a Python file), it is your own task (docs/grpo.md).
set -e
here=$(dirname "$0")
toy=${TOY:-toy}
[ -n "$MODEL" ] || python "$here/build_toy.py" "$toy"

rapidformer --task grpo \
    --pretrained-model-name-or-path "${MODEL:-$toy/model}" \
    --data-path "${DATA:-$toy/data}" \
    --reward-function "${REWARD:-$here/reward.py}" \
    --num-generations 24 \
    --max-new-tokens 2 \
    --micro-batch-size 10 \
    --epochs 2 \
    --lr 4e-3 \
    --lr-decay-style constant \
    --seed 42 \
    "$@"

# Then ask it:
#   rapidformer predict --load RUN --input '{"prompt": "copy 7 :"}'
