#!/usr/bin/env bash
# FLUX.2-dev learns what people prefer (PickScore) and what the prompt says (CLIPScore) by Flow-GRPO.
# Data: Pick-a-Pic's prompts, and PartiPrompts held out, from the hub (`pip install 'gerl[hub]'`); or TRAIN=FILE
#   HELD_OUT=FILE, one prompt per line.
# The weights are gated: accept their licence on the hub, then `hf auth login`.
# GPUs: 8, a step as published, for as many. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/flux2_dev_pickscore.sh, or GPU=80gb with the keys that fit it there
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/memory.md), of which 4 share the weights, weights 28.3 GB
#   of 112.6 GB, LoRA of 402.7 M parameters with its optimizer 8.05 GB, trajectories 1.8 GB, about 48 GB at the peak,
#   in the update; scorers on the same GPU come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=flux2_dev_pickscore hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
recipe=flux2_dev_pickscore
one_gpu=(rollout.prompts_per_step=8 rollout.n=8 cluster.ranks_per_worker=1 model.shard=none model.offload=blocks)
gpu_24gb=(none)
# shellcheck source=examples/recipes/common.sh
source "${BASH_SOURCE[0]%/*}/common.sh"
