#!/usr/bin/env bash
# Wan 2.1 1.3B learns to write in videos (OCR of every fourth frame) by Flow-GRPO.
# Data: gerl's lists signs_train and signs_val; or TRAIN=FILE HELD_OUT=FILE, one prompt per line, with the texts to be
#   written in double quotes.
# GPUs: 8, 16 videos a GPU as published, for one. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/wan21_1b3_ocr.sh, or GPU=80gb or GPU=24gb with the keys that fit it there
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/memory.md) weights 14.5 GB, LoRA of 23.6 M parameters
#   with its optimizer 0.47 GB, trajectories 0.4 GB, about 20 GB at the peak, in the update; scorers on the same GPU
#   come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=wan21_1b3_ocr hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
recipe=wan21_1b3_ocr
one_gpu=(rollout.prompts_per_step=4)
gpu_24gb=()
# shellcheck source=examples/recipes/common.sh
source "${BASH_SOURCE[0]%/*}/common.sh"
