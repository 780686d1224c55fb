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
set -euo pipefail

keys=("data.train=${TRAIN:-my_prompts.jsonl}" "validation.data=${HELD_OUT:-my_held_out.jsonl}")
if [[ ${GPUS:-8} == 1 || -n ${GPU:-} ]]; then
    keys+=(rollout.prompts_per_step=8 rollout.n=8)
fi
case ${GPU:-} in # one GPU of that memory: computed, not measured
24gb)
    keys+=(model.quantize_encoders=int8 model.offload=blocks)
    keys+=(rollout.micro_batch_size=2 actor.micro_batch_size=1 validation.micro_batch_size=2)
    ;;
80gb | '') ;;
*)
    echo "GPU=$GPU: give 24gb or 80gb" >&2
    exit 2
    ;;
esac
own=()
for key in "${keys[@]}"; do # one that is passed on takes the place of the recipe's
    [[ " $* " == *" ${key%%=*}="* ]] || own+=("$key")
done
exec python -m gerl.trainer.main_flowgrpo experiment=qwen_image_edit_geneval "${own[@]}" "$@"
