"""Workers of several ranks, each with a part of weights or tokens, over Ray: the runs are those of whole ones."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from drills import ALL, more
from ranks import ROOT

# three of the six prompts always get the same reward, so that some ranks have nothing to train
DULL = """
import numpy as np

def compute_score(images, prompts, metadata):
    return [0.5 if len(p) < 6 else float(np.asarray(i).mean()) / 255 for i, p in zip(images, prompts)]
"""
# three micro-batches for two ranks, of which each draws two, and two optimizer steps
UNEVEN = """
algorithm=flow_grpo rollout.prompts_per_step=3 actor.updates_per_step=2 actor.micro_batch_size=3 actor.lr=0.01
trainer.steps=3
""".split()


@more
def test_ranks_with_a_part_of_the_weights_train_as_whole_workers(
    train: Callable[..., Any], workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one of them dies while they draw together (`drills.ALL`): both begin anew."""
    (workplace / "some_dull.py").write_text(DULL)
    keys = {"scorer": "some_dull.py", "validation__data": workplace / "val.txt"}
    whole = train(tmp_path / "whole", *UNEVEN, cluster__num_workers=2, **keys)
    ranks = {"cluster__launcher": "ray", "cluster__num_workers": 1, "cluster__ranks_per_worker": 2}
    (tmp_path / "kills").mkdir()
    if ALL:
        (tmp_path / "kills" / "sample.1.1").write_text(str(int(signal.SIGKILL)))
    monkeypatch.setenv("GERL_KILLS", str(tmp_path / "kills"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "in_workers"), str(ROOT)]))
    parts = train(tmp_path / "parts", *UNEVEN, "model.shard=all", **ranks, **keys)
    parts.assert_same(whole, 3)
    assert not list((tmp_path / "kills").iterdir()) and sum(parts.column("cluster/restarts")) == int(ALL)
    assert max(whole.column("actor/grad_norm")) > 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL has no two ranks on one")
@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_ranks_on_gpus_train_as_whole_workers(
    dtype: str, off: float, train: Callable[..., Any], tmp_path: Path
) -> None:
    keys = {"cluster__launcher": "ray", "cluster__device": "cuda", "model__dtype": dtype}
    whole = train(tmp_path / "whole", *UNEVEN, cluster__num_workers=2, **keys)
    parts = train(
        tmp_path / "parts", *UNEVEN, "model.shard=all", cluster__num_workers=1, cluster__ranks_per_worker=2, **keys
    )
    assert float((parts.lora(3) - whole.lora(3)).norm() / whole.lora(3).norm()) < off
    assert max(parts.column("actor/ratio_deviation")) < 1e-2


# the order of the images, which rounding does not change
ORDER = """
import numpy as np

def compute_score(images, prompts, metadata):
    means = [float(np.asarray(image, np.float64).mean()) for image in images]
    return [sorted(means).index(mean) / len(means) for mean in means]
"""
# FLUX draws 16 tokens of an image and 8 of a text
SHARED = """
algorithm=dgpo sampling.window_range=[0,3] rollout.prompts_per_step=2 actor.updates_per_step=2
actor.micro_batch_size=3 actor.lr=0.01 actor.eps=1e-4 trainer.steps=2 cluster.num_workers=1
""".split()


@more
def test_ranks_that_share_tokens_train_as_one(train: Callable[..., Any], workplace: Path, tmp_path: Path) -> None:
    """An algorithm that pools its groups of four in parts of three; a policy gradient: unit/model/test_context.py."""
    (workplace / "order.py").write_text(ORDER)
    tiny.flux().save_pretrained(tmp_path / "flux")
    keys = {"scorer": "order.py", "validation__data": workplace / "val.txt", "model__path": tmp_path / "flux"}
    one = train(tmp_path / "one", *SHARED, **keys)
    ranks = {"cluster__launcher": "ray", "cluster__ranks_per_worker": 2, "cluster__context": 2}
    shared = train(tmp_path / "shared", *SHARED, "model.shard=denoiser", **keys, **ranks)
    for found, expected in zip(shared.untimed(), one.untimed(), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
    torch.testing.assert_close(shared.lora(2), one.lora(2), atol=2e-5, rtol=1e-3)
    assert max(one.column("actor/grad_norm")) > 0
