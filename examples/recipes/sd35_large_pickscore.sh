#!/usr/bin/env bash
# SD3.5-Large learns what people prefer (PickScore) by DiffusionNFT.
# Data: Pick-a-Pic's prompts, and PartiPrompts held out, from the hub (`pip install 'gerl[hub]'`); or TRAIN=FILE
#   HELD_OUT=FILE, one prompt per line.
# The weights are gated: accept their licence on the hub, then `hf auth login`.
# GPUs: 8, a step as published, for as many. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/sd35_large_pickscore.sh, or GPU=80gb or GPU=24gb with the keys that fit it there
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/memory.md) weights 27.7 GB, LoRA of 47.2 M parameters
#   with its optimizer 1.32 GB, trajectories 0.3 GB, about 36 GB at the peak, while images are decoded; scorers on the
#   same GPU come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=sd35_large_pickscore hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
recipe=sd35_large_pickscore
one_gpu=(rollout.prompts_per_step=8 rollout.n=8)
gpu_24gb=(model.offload=blocks)
# shellcheck source=examples/recipes/common.sh
source "${BASH_SOURCE[0]%/*}/common.sh"
