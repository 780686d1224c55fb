#!/usr/bin/env bash
# Qwen-Image-Edit learns to edit how many things a picture shows (GenEval) and to leave the rest alone, by Flow-GRPO.
# Data: my_prompts.jsonl and my_held_out.jsonl, a row such as {"prompt": "make it three cats", "image": "cats/1.png",
#   "tag": "counting", "include": [{"class": "cat", "count": 3}]}, pictures relative to the file; or TRAIN=FILE
#   HELD_OUT=FILE.
# The reward needs `pip install 'gerl[geneval]'`.
# GPUs: 8, a step as published, for 32 GPUs there. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/qwen_image_edit_geneval.sh, or GPU=80gb or GPU=24gb with the keys that fit it there
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/memory.md) weights 40.9 GB of 57.7 GB, LoRA of 424.7 M
#   parameters with its optimizer 8.49 GB, trajectories 0.6 GB, about 68 GB at the peak, while prompts are encoded;
#   scorers on the same GPU come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=qwen_image_edit_geneval hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
recipe=qwen_image_edit_geneval
train=my_prompts.jsonl
held_out=my_held_out.jsonl
one_gpu=(rollout.prompts_per_step=8 rollout.n=8)
gpu_24gb=(model.quantize_encoders=int8 model.offload=blocks)
gpu_24gb+=(rollout.micro_batch_size=2 actor.micro_batch_size=1 validation.micro_batch_size=2)
# shellcheck source=examples/recipes/common.sh
source "${BASH_SOURCE[0]%/*}/common.sh"
