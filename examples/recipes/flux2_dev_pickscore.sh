#!/usr/bin/env bash
# FLUX.2-dev learns what people prefer (PickScore) and what the prompt says (CLIPScore) by Flow-GRPO.
# Data: one prompt a line in my_prompts.txt and my_held_out.txt; or TRAIN=FILE HELD_OUT=FILE.
# The weights are gated: accept their licence on the hub, then `hf auth login`.
# GPUs: 8, a step as published, for as many. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/flux2_dev_pickscore.sh
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/sizing.md), of which 4 share the weights, weights 28.3 GB
#   of 112.6 GB, LoRA of 402.7 M parameters with its optimizer 8.05 GB, trajectories 1.8 GB, about 48 GB at the peak,
#   in the update; scorers on the same GPU come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=flux2_dev_pickscore hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
set -euo pipefail

keys=("data.train=${TRAIN:-my_prompts.txt}" "validation.data=${HELD_OUT:-my_held_out.txt}")
if [[ ${GPUS:-8} == 1 ]]; then
    keys+=(rollout.prompts_per_step=8 rollout.n=8 cluster.ranks_per_worker=1 model.shard=none model.offload=blocks)
fi
own=()
for key in "${keys[@]}"; do # one that is passed on takes the place of the recipe's
    [[ " $* " == *" ${key%%=*}="* ]] || own+=("$key")
done
exec python -m gerl.trainer.main_flowgrpo experiment=flux2_dev_pickscore "${own[@]}" "$@"
