#!/usr/bin/env bash
# HiDream-I1-Full learns what people prefer (PickScore, ImageReward) by MixGRPO.
# Data: Pick-a-Pic's prompts, and PartiPrompts held out, from the hub (`pip install 'gerl[hub]'`); or TRAIN=FILE
#   HELD_OUT=FILE, one prompt per line.
# GPUs: 8, three prompts a GPU as published, for 32 GPUs there. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/hidream_pickscore.sh, or GPU=80gb or GPU=24gb with the keys that fit it there
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/memory.md) weights 34.2 GB of 61.7 GB, LoRA of 41.9 M
#   parameters with its optimizer 0.84 GB, trajectories 2.7 GB, about 54 GB at the peak, while prompts are encoded;
#   scorers on the same GPU come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=hidream_pickscore hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
recipe=hidream_pickscore
one_gpu=(rollout.prompts_per_step=8 rollout.n=8)
gpu_24gb=(model.quantize_encoders=int8 model.offload=blocks)
# shellcheck source=examples/recipes/common.sh
source "${BASH_SOURCE[0]%/*}/common.sh"
