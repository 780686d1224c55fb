"""A value function in whole runs: any number of workers, deaths, resumed runs and rollbacks, and other pipelines."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from drills import more
from running import trained
from safetensors.torch import load_file
from zoo import text_to_image

from gerl.cluster import Cluster
from gerl.commandline.composition import compose_run
from gerl.run.checkpoint import load_checkpoint
from gerl.run.guard import Signal
from gerl.trainer.extensions.critic import Critic
from gerl.trainer.main_flowgrpo import main
from gerl.trainer.recovery import roll_back
from gerl.trainer.step import RollBack
from gerl.utils.dataset import load_prompts

Train = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
SETTINGS = """
algorithm=flow_ppo critic.warmup_steps=1 rollout.n=2 rollout.prompts_per_step=4 rollout.micro_batch_size=2 actor.lr=0.01
checkpoint.every=1 checkpoint.keep=9 reward.trial=false
""".split()
FILE = "extensions/critic.safetensors"
METRICS = ("explained_variance", "value_mean", "loss", "grad_norm")


@pytest.fixture(scope="module")
def whole(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(tmp_path_factory.mktemp("critic") / "run", *SETTINGS, trainer__steps=STEPS)


def assert_same(run: Any, other: Any) -> None:
    """Weights, critic and metrics are bitwise equal."""
    run.assert_same(other, STEPS)
    assert (run.checkpoint(STEPS) / FILE).read_bytes() == (other.checkpoint(STEPS) / FILE).read_bytes()


def test_a_run_logs_its_critic_and_keeps_the_ratio_at_1(whole: Any) -> None:
    for name in METRICS:
        assert len(whole.column(f"critic/{name}")) == STEPS, name
    assert whole.column("critic/explained_variance")[0] == pytest.approx(0.0, abs=1e-6)  # the mean explains nothing
    assert min(whole.column("timing/critic_s")) > 0
    assert set(whole.column("actor/ratio_deviation")) == {0.0}
    saved = [load_file(whole.checkpoint(step) / FILE) for step in (1, STEPS)]
    assert [int(tensors["trained"]) for tensors in saved] == [1, STEPS]
    assert not torch.equal(*(tensors["network/0.weight"] for tensors in saved))


def test_an_interrupted_run_continues_with_its_critic(whole: Any, train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, *SETTINGS, trainer__steps=2)
    assert_same(train(folder, *SETTINGS, f"checkpoint.resume={folder}", trainer__steps=STEPS), whole)


def test_a_rollback_restores_the_critic(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = compose_run(arguments(folder, *SETTINGS, trainer__steps=3)).config
    with Cluster(config.cluster) as cluster:
        run = trained(config, folder, cluster, load_prompts(config.data.train))
        critic = run.extensions["critic"]
        assert isinstance(critic, Critic) and critic.model.trained == 3
        checkpoint = load_checkpoint(folder / "checkpoints" / "step_1")
        roll_back(run, RollBack(checkpoint, 0.1, (Signal("kl", "kl", 3, 1.0, 0.5, "the KL rose", []),)))
        assert critic.model.trained == 1 and critic.state() == checkpoint.read(FILE)
        assert load_checkpoint(folder / "checkpoints" / "step_1").read(FILE) == checkpoint.read(FILE)  # saved again
        run.fleet.clear()


def test_two_workers_have_the_same_critic(whole: Any, train: Train, tmp_path: Path) -> None:
    """Bitwise after the first step; later the policies differ by the order in which gradients are added."""
    two = train(tmp_path / "run", *SETTINGS, trainer__steps=STEPS, cluster__num_workers=2)
    assert (two.checkpoint(1) / FILE).read_bytes() == (whole.checkpoint(1) / FILE).read_bytes()
    for name in METRICS:
        found, expected = two.column(f"critic/{name}"), whole.column(f"critic/{name}")
        assert found[0] == expected[0] and found == pytest.approx(expected, rel=2e-2, abs=2e-3), name


def test_over_ray_a_step_that_lost_a_worker_is_repeated_bitwise(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it trains, when the critic has already learnt from the step."""
    keys = {"trainer__steps": STEPS, "cluster__num_workers": 2}
    expected = train(tmp_path / "local", *SETTINGS, **keys)
    (tmp_path / "kills").mkdir()
    (tmp_path / "kills" / "accumulate.1.3").write_text(str(int(signal.SIGKILL)))
    monkeypatch.setenv("GERL_KILLS", str(tmp_path / "kills"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "in_workers"), str(ROOT)]))
    run = train(tmp_path / "ray", *SETTINGS, **keys, cluster__launcher="ray")
    assert not list((tmp_path / "kills").iterdir())
    assert_same(run, expected)


@more
@pytest.mark.parametrize("layout", ["split", "ranks", "ahead"])
def test_other_layouts_have_a_critic_too(layout: str, whole: Any, train: Train, tmp_path: Path) -> None:
    ways = {
        "split": "cluster.launcher=ray cluster.num_workers=2 cluster.layout=split",
        "ranks": "cluster.launcher=ray cluster.num_workers=1 cluster.ranks_per_worker=2 model.shard=all",
        "ahead": "trainer.staleness=1",
    }
    run = train(tmp_path / "run", *SETTINGS, *ways[layout].split(), trainer__steps=STEPS)
    first = [run.column(f"critic/{name}")[0] for name in METRICS]
    assert first == pytest.approx([whole.column(f"critic/{name}")[0] for name in METRICS], rel=1e-3, abs=1e-6)
    assert len(run.column("critic/explained_variance")) == STEPS


PIPELINES = {
    "flux": (tiny.flux, "{max_sequence_length: 8}", ""),
    "sdxl": (text_to_image.sdxl, "{max_sequence_length: null}", "sampling.kernel=ddim sampling.noise_level=1"),
    "wan": (tiny.wan, "{num_frames: 5, max_sequence_length: 16}", ""),
    "z_image": (tiny.z_image, "{max_sequence_length: null}", ""),
}
CRITICS = {"hidden": "critic.features=hidden", "latents": "critic.features=latents critic.residual=true"}


@pytest.mark.parametrize("features", CRITICS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "sdxl" else more) for n in PIPELINES])
def test_any_pipeline_has_a_critic(name: str, features: str, train: Train, tmp_path: Path) -> None:
    build, call, keys = PIPELINES[name]
    build().save_pretrained(tmp_path / "model")
    fitted = [*SETTINGS, *keys.split(), *CRITICS[features].split(), f"model.path={tmp_path / 'model'}"]
    run = train(tmp_path / "run", *fitted, trainer__steps=2, sampling__call=call)
    assert max(run.column("actor/ratio_deviation")) < 1e-5
    assert len(run.column("critic/explained_variance")) == 2
    assert min(run.column("actor/grad_norm")) > 0


def test_groups_that_share_a_beginning_and_windows_have_values(train: Train, tmp_path: Path) -> None:
    """The denoiser is called once for what images share; each group has a window of its own."""
    shared = """
    sampling.same_init_noise=true sampling.window_size=2 sampling.window_range=[0,3] sampling.window_per=group
    rollout.prompts_per_step=3 rollout.n=4 rollout.micro_batch_size=4
    """.split()
    run = train(tmp_path / "run", *SETTINGS, *shared, trainer__steps=3)
    counts = load_file(run.checkpoint(3) / FILE)["features/count"]
    assert counts.sum() == 3 * 12 * 2 and counts[3] == 0 < counts[:3].min()
    assert len(run.column("critic/explained_variance")) == 3


def test_a_changed_width_is_refused_on_resume(
    whole: Any, arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    again = [*SETTINGS, f"checkpoint.resume={whole.folder}", "critic.width=16"]
    assert main(arguments(whole.folder, *again, trainer__steps=9)) == 2
    assert "critic.width" in capsys.readouterr().err
