#!/usr/bin/env bash
# SD3.5-Medium learns to write (OCR) by Flow-GRPO-Fast.
# Data: gerl's lists signs_train and signs_val; or TRAIN=FILE HELD_OUT=FILE, one prompt per line, with the texts to be
#   written in double quotes.
# The weights are gated: accept their licence on the hub, then `hf auth login`.
# GPUs: 8, a step as published, for 32 GPUs there. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/sd35_medium_ocr.sh, or GPU=80gb or GPU=24gb with the keys that fit it there
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/memory.md) weights 16.4 GB, LoRA of 23.9 M parameters
#   with its optimizer 0.48 GB, trajectories 0.5 GB, about 24 GB at the peak, while images are decoded; scorers on the
#   same GPU come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=sd35_medium_ocr hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
recipe=sd35_medium_ocr
one_gpu=(rollout.prompts_per_step=8 rollout.n=8)
gpu_24gb=(model.offload=encoders)
# shellcheck source=examples/recipes/common.sh
source "${BASH_SOURCE[0]%/*}/common.sh"
