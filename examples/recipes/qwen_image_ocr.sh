#!/usr/bin/env bash
# Qwen-Image learns to write (OCR) by Flow-GRPO.
# Data: one prompt a line in my_prompts.txt and my_held_out.txt, the texts to be drawn in double quotes; or TRAIN=FILE
#   HELD_OUT=FILE.
# GPUs: 8, a step as published, for 4 GPUs in [1] and 32 in [2]. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/qwen_image_ocr.sh
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/sizing.md) weights 57.7 GB, LoRA of 424.7 M parameters
#   with its optimizer 8.49 GB, trajectories 0.1 GB, about 71 GB at the peak, in the update; scorers on the same GPU
#   come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=qwen_image_ocr hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
set -euo pipefail

keys=("data.train=${TRAIN:-my_prompts.txt}" "validation.data=${HELD_OUT:-my_held_out.txt}")
if [[ ${GPUS:-8} == 1 ]]; then
    keys+=(rollout.prompts_per_step=8 rollout.n=8)
fi
own=()
for key in "${keys[@]}"; do # one that is passed on takes the place of the recipe's
    [[ " $* " == *" ${key%%=*}="* ]] || own+=("$key")
done
exec python -m gerl.trainer.main_flowgrpo experiment=qwen_image_ocr "${own[@]}" "$@"
