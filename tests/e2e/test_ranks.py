"""Workers of several ranks, each with a part of the weights, over Ray: the run is that of whole ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# three of the six prompts always get the same reward, so that some ranks have nothing to train
DULL = """
import numpy as np

def compute_score(images, prompts, metadata):
    return [0.5 if len(p) < 6 else float(np.asarray(i).mean()) / 255 for i, p in zip(images, prompts)]
"""
# three micro-batches for two ranks, of which each draws two, and two optimizer steps
UNEVEN = """
algorithm=flow_grpo rollout.prompts_per_step=3 actor.updates_per_step=2 actor.micro_batch_size=3 actor.lr=0.01
trainer.steps=3 cluster.launcher=ray
""".split()


def test_ranks_with_a_part_of_the_weights_train_as_whole_workers(
    train: Callable[..., Any], workplace: Path, tmp_path: Path
) -> None:
    (workplace / "some_dull.py").write_text(DULL)
    keys = {"scorer": "some_dull.py", "validation__data": workplace / "val.txt"}
    whole = train(tmp_path / "whole", *UNEVEN, cluster__num_workers=2, **keys)
    parts = train(
        tmp_path / "parts", *UNEVEN, "model.shard=all", cluster__num_workers=1, cluster__ranks_per_worker=2, **keys
    )
    assert parts.untimed() == whole.untimed()
    state, expected = parts.state(3), whole.state(3)
    assert sorted(state) == sorted(expected) and all(torch.equal(state[name], expected[name]) for name in state)
    assert max(whole.column("actor/grad_norm")) > 0
