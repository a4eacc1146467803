#!/bin/bash
# Black box: pre-train without writing code. MODEL may be a Hub name or a local folder; PREFIX names
# the files that `rapidformer preprocess --split-sentences` has made with the vocabulary VOCAB.
export MASTER_ADDR=localhost
export MASTER_PORT=6010
export NNODES=1
export NODE_RANK=0

rapidformer --task pretraining \
    --pretrained-model-name-or-path "${MODEL:-bert-base-uncased}" \
    --micro-batch-size 16 \
    --global-batch-size 128 \
    --seq-length 512 \
    --tokenizer-type BertWordPieceLowerCase \
    --max-position-embeddings 512 \
    --train-iters 100 \
    --data-path "${PREFIX:-book_wiki_owtv2_small_text_sentence}" \
    --vocab-file "${VOCAB:-bert-en-uncased-vocab.txt}" \
    --data-impl mmap \
    --split 980,20 \
    --lr 1e-3 \
    --lr-decay-style linear \
    --min-lr 0.0 \
    --lr-decay-iters 2000 \
    --weight-decay 1e-2 \
    --clip-grad 1.0 \
    --lr-warmup-fraction .01 \
    --mixed-precision \
    --onnx-runtime-training \
    --fsdp-memory-optimization \
    "$@"
