#!/usr/bin/env bash
# FLUX.1-Kontext learns to edit how many things a picture shows (GenEval) and to leave the rest alone, by Flow-GRPO.
# Data: my_prompts.jsonl and my_held_out.jsonl, a row such as {"prompt": "make it three cats", "image": "cats/1.png",
#   "tag": "counting", "include": [{"class": "cat", "count": 3}]}, pictures relative to the file; or TRAIN=FILE
#   HELD_OUT=FILE.
# The weights are gated: accept their licence on the hub, then `hf auth login`.
# The reward needs `pip install 'gerl[geneval]'`.
# GPUs: 8, a step as published, for 28 GPUs there. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/flux1_kontext_geneval.sh, or GPU=80gb or GPU=24gb with the keys that fit it there
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/memory.md) weights 33.8 GB, LoRA of 179.3 M parameters
#   with its optimizer 3.59 GB, trajectories 0.4 GB, about 41 GB at the peak, in the update; scorers on the same GPU
#   come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=flux1_kontext_geneval hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
recipe=flux1_kontext_geneval
train=my_prompts.jsonl
held_out=my_held_out.jsonl
one_gpu=(rollout.prompts_per_step=8 rollout.n=8)
gpu_24gb=(model.offload=blocks)
# shellcheck source=examples/recipes/common.sh
source "${BASH_SOURCE[0]%/*}/common.sh"
