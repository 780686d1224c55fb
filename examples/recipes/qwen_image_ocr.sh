#!/usr/bin/env bash
# Qwen-Image learns to write (OCR) by Flow-GRPO.
# Data: gerl's lists signs_train and signs_val; or TRAIN=FILE HELD_OUT=FILE, one prompt per line, with the texts to be
#   written in double quotes.
# GPUs: 8, a step as published, for 4 GPUs in [1] and 32 in [2]. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/qwen_image_ocr.sh, or GPU=80gb or GPU=24gb with the keys that fit it there
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/memory.md) weights 57.7 GB, LoRA of 424.7 M parameters
#   with its optimizer 8.49 GB, trajectories 0.1 GB, about 71 GB at the peak, in the update; scorers on the same GPU
#   come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=qwen_image_ocr hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
recipe=qwen_image_ocr
one_gpu=(rollout.prompts_per_step=8 rollout.n=8)
gpu_24gb=(model.quantize_encoders=int8 model.offload=blocks)
# shellcheck source=examples/recipes/common.sh
source "${BASH_SOURCE[0]%/*}/common.sh"
