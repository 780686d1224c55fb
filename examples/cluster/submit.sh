#!/usr/bin/env bash
# A training as a job of a Ray cluster that runs already, from a machine that reaches its dashboard:
#
#   bash examples/cluster/submit.sh my_experiment KEYS
#
# my_experiment: a folder with what the run needs (experiment file, prompts, rewards), not gerl itself, which the machines of
# the cluster have. It becomes the current folder of the run, on all of them, so paths in it are relative. What the run
# writes must not lie in it: give a folder that all machines see by RUN.
#
# The dashboard is at RAY_API_SERVER_ADDRESS, http://127.0.0.1:8265 if it is not set, as after
# `ssh -L 8265:127.0.0.1:8265 HEAD`. The cluster's token is that of ~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
folder=${1:?the folder with experiment file, prompts and rewards}
run=${RUN:?a folder that all machines see, such as /shared/runs/mine}
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
unset RAY_ADDRESS # here it would be that of the dashboard, elsewhere that of the cluster

ray job submit --address="${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" --no-wait \
    --working-dir="$folder" --runtime-env="$here/runtime_env.yaml" -- \
    python -m gerl.trainer.main_flowgrpo "hydra.run.dir=$run" checkpoint.resume=auto "${@:2}"
