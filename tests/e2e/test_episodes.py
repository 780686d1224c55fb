"""Episodes from end to end: draw, then edit; a rewriter and a painter; resumed, and over Ray with a killed worker."""

import csv
import html
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from drills import more
from safetensors.torch import load_file

import gerl
from gerl.evaluate.command import main as evaluate
from gerl.evaluate.comparison import ScoredRow
from gerl.export.command import main as export
from gerl.run import settings
from gerl.run.page import frozen
from gerl.run.validation import load_validation

ROOT = Path(__file__).resolve().parents[2]
Train = Callable[..., Any]
EDIT = {
    "pipeline": "StableDiffusion3Img2ImgPipeline",
    "sampling.call": "{strength: 0.5, max_sequence_length: 8}",
    "sampling.window_range": "[0, 1]",
    "model.lora_rank": "2",
}
STEPS = 4


def flow(values: dict[str, str]) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in values.items()) + "}"


TURNS = "episode.turns=[{role: draw}, {role: edit, images: 3}]"
EDITED = (TURNS, f"episode.roles={{edit: {flow(EDIT)}}}")
OFTEN = "checkpoint.every=1 checkpoint.keep=9 validation.every=2 actor.lr=0.01 reward.trial=false".split()


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model with its tokenizer."""
    folder = tmp_path_factory.mktemp("language")
    torch.manual_seed(0)
    sizes = tiny.LANGUAGE | tiny.SPECIAL | {"max_position_embeddings": 64}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    tiny.tokenizer(64).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def edited(train: Train, workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("edited") / "run"
    return train(folder, *EDITED, *OFTEN, trainer__steps=STEPS, validation__data=workplace / "val.txt")


@pytest.fixture(scope="module")
def rewritten(train: Train, workplace: Path, language: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("rewritten") / "run"
    return train(folder, *written(language), trainer__steps=STEPS, validation__data=workplace / "val.txt")


def written(language: Path) -> list[str]:
    """Keys of a rewriter and a painter."""
    keys = {"kind": "text", "model.path": str(language), "tokens": "5", "kept": "1", "actor.lr": "0.02"}
    turns = "episode.turns=[{role: rewrite, images: 3}, {role: draw}]"
    return [turns, f"episode.roles={{rewrite: {flow(keys)}}}", "rollout.n=2", *OFTEN]


def role_lora(run: Any, step: int, role: str) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoint(step) / "roles" / role / "lora" / "pytorch_lora_weights.safetensors")


def test_an_episode_trains_both_roles_with_ratio_1(edited: Any) -> None:
    assert edited.column("actor/ratio_deviation") == edited.column("actor/edit/ratio_deviation") == [0.0] * STEPS
    assert (
        edited.column("actor/edit/policy_version")[-1] == 2 * STEPS and min(edited.column("actor/edit/grad_norm")) > 0
    )
    assert edited.column("evaluations/images")[0] == 2 * 4 + 2 * 3  # two prompts; the best of each is edited
    assert all(key in edited.metrics[-1] for key in ("val/turn_0/reward/mean", "val/turn_1/reward/mean"))
    assert (edited.folder / "samples" / "validation_episode_000004.png").exists()
    words = (edited.folder / "log.txt").read_text()
    ratios = [line for line in words.splitlines() if "log ratio| is at most" in line or "the ratio is clipped" in line]
    assert len(ratios) == 4 and [": edit: " in line for line in ratios] == [False, False, True, True]
    assert edited.metrics[-1]["actor/edit/off_policy/clip_range"] == edited.metrics[-1]["actor/off_policy/clip_range"]
    first, last = role_lora(edited, 1, "edit"), role_lora(edited, STEPS, "edit")
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert {value.shape[0] for name, value in last.items() if "lora_A" in name} == {2}


def starts(folder: Path, name: str) -> tuple[dict[str, Any], list[int | None]]:
    """A sheet of episodes, and the image or text that each of its groups starts from."""
    found = json.loads((folder / name).read_text())
    return found, [turn[3] for turn in found["turns"]]


def test_the_page_has_the_turns_of_an_episode(edited: Any) -> None:
    for step in (0, 2, STEPS):
        found, groups = starts(edited.folder, f"validation/episode_{step:06d}.json")
        count = len(found["images"]) // 2
        assert groups == [start for k in range(count) for start in (None, 2 * k)]
        validation = json.loads((edited.folder / f"validation/step_{step:06d}.json").read_text())
        assert [image[2] for image in found["images"]][1::2] == validation["rewards"]
    found, groups = starts(edited.folder, f"live/step_{STEPS:06d}.json")
    assert [turn[:2] for turn in found["turns"]] == [[0, "draw"], [1, "edit"]] * 2 and found["of"] == 2 * 4 + 2 * 3
    for start, first in zip(groups[1::2], (0, 7), strict=True):
        own = [image[2] for image in found["images"][first : first + 4]]
        assert start is not None and own[start - first] == max(own)  # the best one is edited
    data = frozen(edited.folder, settings.read_config(edited.folder / "config.yaml"))
    assert sorted(data["episodes"]) == ["0", str(STEPS)] and data["answers"]["run"]["roles"] == ["draw", "edit"]
    assert "val/turn_0/reward/mean" in data["answers"]["series"]["series"]


def test_one_turn_equals_a_plain_run(train: Train, tmp_path: Path) -> None:
    keys = ("checkpoint.every=1", "reward.trial=false")
    plain = train(tmp_path / "plain", *keys, trainer__steps=2)
    alone = train(tmp_path / "alone", *keys, "episode.turns=[{role: draw}]", trainer__steps=2)
    assert torch.equal(plain.lora(2), alone.lora(2))
    assert alone.column("reward/mean") == plain.column("reward/mean")


def test_a_resumed_episode_continues_bit_for_bit(edited: Any, train: Train, workplace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, *EDITED, *OFTEN, trainer__steps=2, validation__data=workplace / "val.txt")
    again = train(folder, *EDITED, *OFTEN, f"checkpoint.resume={folder}", trainer__steps=STEPS,
                  validation__data=workplace / "val.txt")  # fmt: skip
    state, expected = again.state(STEPS), edited.state(STEPS)
    assert sorted(state) == sorted(expected) and all(torch.equal(state[name], expected[name]) for name in state)
    for name in [f"validation/episode_{step:06d}.json" for step in (0, 2, STEPS)] + [f"live/step_{STEPS:06d}.json"]:
        assert (folder / name).read_bytes() == (edited.folder / name).read_bytes()


def test_alternating_roles_leave_the_frozen_lora_alone(train: Train, tmp_path: Path) -> None:
    run = train(tmp_path / "run", *EDITED, *OFTEN, "episode.train={alternate: 2}", trainer__steps=STEPS)
    lora = [run.lora(step) for step in range(1, STEPS + 1)]
    edits = [torch.cat([v.flatten() for v in role_lora(run, step, "edit").values()]) for step in range(1, STEPS + 1)]
    assert not torch.equal(lora[0], lora[1]) and torch.equal(lora[1], lora[2]) and torch.equal(lora[2], lora[3])
    assert torch.equal(edits[0], edits[1]) and not torch.equal(edits[1], edits[2])
    assert not torch.equal(edits[2], edits[3])


def test_each_image_goes_on_and_gets_the_reward_of_its_descendants(train: Train, tmp_path: Path) -> None:
    keys = ("episode.next=each", "episode.returns=last", "rollout.n=2")
    run = train(tmp_path / "run", *EDITED, *keys, trainer__steps=1)
    (row,) = run.metrics
    assert row["evaluations/images"] == 2 * 2 + 2 * 2 * 3
    assert row["turn_1/reward/mean"] == pytest.approx(row["reward/mean"])  # turn 0 has the mean of turn 1


def test_a_rewriter_learns_beside_a_painter(
    rewritten: Any, train: Train, workplace: Path, language: Path, tmp_path: Path
) -> None:
    run, given, data = rewritten, written(language), workplace / "val.txt"
    assert run.column("actor/rewrite/ratio_deviation") == [0.0] * STEPS
    assert min(run.column("actor/rewrite/grad_norm")) > 0 and run.column("evaluations/images")[0] == 2 * 3 * 2 + 2 * 3
    for name, each in (("live/step_000002", 3), ("validation/episode_000002", 1)):
        found, groups = starts(run.folder, f"{name}.json")
        texts = [k for k, image in enumerate(found["images"]) if len(image) == 6]
        assert groups.count(None) * each == len(texts) and [start for start in groups if start is not None] == texts
    assert run.metrics[-1]["actor/rewrite/off_policy/clip_range"] == 0.2
    # all texts have the same number of images, so the rewards of both have one mean; only images have other statistics
    assert run.column("turn_0/reward/mean") == pytest.approx(run.column("reward/mean"))
    assert run.column("reward/mean") == pytest.approx(run.column("reward/bright/mean"))
    half = train(tmp_path / "half", *given, trainer__steps=2, validation__data=data)
    resume = f"checkpoint.resume={half.folder}"
    again = train(half.folder, *given, resume, trainer__steps=STEPS, validation__data=data)
    state, expected = again.state(STEPS), run.state(STEPS)
    assert sorted(state) == sorted(expected) and all(torch.equal(state[name], expected[name]) for name in state)
    assert any(name.startswith("roles/rewrite/lora/") for name in state)


@more
def test_two_workers_over_ray_of_which_one_is_killed_in_either_role(
    edited: Any, train: Train, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes = tmp_path / "kills"
    wishes.mkdir()
    for wish in ("finish_step.1.2", "edit:step.1.3"):  # in the update of the first role, and of the second
        (wishes / wish).write_text(str(int(signal.SIGKILL)))
    monkeypatch.setenv("GERL_KILLS", str(wishes))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "in_workers"), str(ROOT)]))
    keys = {"trainer__steps": STEPS, "validation__data": workplace / "val.txt"}
    given = [*EDITED, *OFTEN, "cluster.num_workers=2", "rollout.micro_batch_size=2"]
    run = train(tmp_path / "run", *given, "cluster.launcher=ray", **keys)
    assert not list(wishes.iterdir()) and sum(run.column("cluster/restarts")) == 2
    quiet = train(tmp_path / "quiet", *given, **keys)  # in this process
    run.assert_same(quiet, STEPS)


def test_a_scorer_of_the_last_turn_rewards_the_first(train: Train, tmp_path: Path) -> None:
    keys = ("episode.next=each", "episode.returns=last", "rollout.n=2", "reward.scorers.bright.turns=[1]")
    run = train(tmp_path / "run", *EDITED, *keys, trainer__steps=1)
    (row,) = run.metrics
    assert row["reward/mean"] == pytest.approx(row["turn_1/reward/mean"]) and row["actor/grad_norm"] > 0


def test_the_lora_of_a_role_is_exported(edited: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export([f"run={edited.folder}", "role=edit", f"out={tmp_path / 'edit'}"]) == 0
    found = load_file(tmp_path / "edit" / "pytorch_lora_weights.safetensors")
    best = [role_lora(edited, int(path.name.split("_")[1]), "edit") for path in edited.folder.glob("checkpoints/*")]
    assert any(found.keys() == lora.keys() and all(torch.equal(found[n], lora[n]) for n in lora) for lora in best)
    assert export([f"run={edited.checkpoint(1)}", "role=draw", f"out={tmp_path / 'draw'}"]) == 0  # the run's own
    own = load_file(tmp_path / "draw" / "pytorch_lora_weights.safetensors")
    lora = load_file(edited.checkpoint(1) / "lora" / "pytorch_lora_weights.safetensors")
    assert own.keys() == lora.keys() and all(torch.equal(own[name], lora[name]) for name in lora)
    assert export([f"run={edited.folder}", "role=paint", f"out={tmp_path / 'paint'}"]) == 2
    assert "edit" in capsys.readouterr().err


def test_the_lora_of_a_language_model_is_exported_with_its_own_alpha(
    rewritten: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    given = [f"run={rewritten.checkpoint(STEPS)}", "role=rewrite", f"out={tmp_path / 'out'}"]
    assert export(given) == 2 and "format=peft" in capsys.readouterr().err
    assert export([*given, "format=peft"]) == 0
    assert "AutoModelForCausalLM.from_pretrained" in caplog.text
    found = json.loads((tmp_path / "out" / "language_model" / "adapter_config.json").read_text())
    assert (found["lora_alpha"], found["r"]) == (64, 32)  # the defaults: it has no keys of the run's model


def test_a_template_with_a_column_that_a_prompt_lacks_is_refused(refused: Callable[..., str]) -> None:
    turns = "episode.turns=[{role: draw}, {role: edit, request: 'make it {style}'}]"
    said = refused(turns, EDITED[1], expect=2)
    assert "episode.turns[1].request" in said and "style" in said and "has " in said


# --- Evaluation of whole episodes


def of(rows: list[ScoredRow], variant: str) -> list[ScoredRow]:
    return [row for row in rows if row.variant == variant]


def test_an_evaluation_of_episodes_repeats_the_validations_and_separates_the_roles(edited: Any, tmp_path: Path) -> None:
    found = gerl.evaluate(lora={"last": edited.checkpoint(STEPS)}, out=tmp_path, trust=True)
    assert list(found.results["total"]) == ["base", "last", "last/draw", "last/edit"] and found.complete
    for variant, step, row in (("base", 0, edited.metrics[0]), ("last", STEPS, edited.metrics[-1])):
        own, validation = of(found.rows, variant), load_validation(edited.folder, step)
        assert [row.values["total"] for row in own] == validation.rewards
        assert found.results["total"][variant].mean.mean == pytest.approx(row["val/turn_1/reward/mean"], abs=1e-12)
        first = found.results["turn_0/total"][variant].mean.mean
        assert first == pytest.approx(row["val/turn_0/reward/mean"], abs=1e-12)
    pictures = {
        name: [[t.picture for t in row.turns] for row in of(found.rows, name)] for name in found.results["total"]
    }
    for base, both, draw, edit in zip(*pictures.values(), strict=True):
        assert edit[0] == base[0] and draw[0] == both[0] != base[0]  # the first turn is of the drawing role
        assert len({base[1], both[1], draw[1], edit[1]}) == 4
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["roles"] == {"base": [], "last": ["draw", "edit"], "last/draw": ["draw"], "last/edit": ["edit"]}
    page = (tmp_path / "gallery.html").read_text()
    assert "last/edit, turn 0 (draw)" in page and "turn_0/total" in page


def test_the_texts_of_a_rewriter_are_in_the_rows_and_on_the_page(rewritten: Any, tmp_path: Path) -> None:
    assert evaluate([f"lora={rewritten.checkpoint(STEPS)}", f"out={tmp_path}", "trust=true"]) == 0
    with (tmp_path / "scores.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for variant, step in (("base", 0), ("step_4", STEPS)):
        totals = [float(row["total"]) for row in rows if row["variant"] == variant]
        assert totals == load_validation(rewritten.folder, step).rewards
    names = ("base", "step_4", "step_4/rewrite", "step_4/draw")
    texts = {name: [row["turn_1/request"] for row in rows if row["variant"] == name] for name in names}
    assert texts["base"] == texts["step_4/draw"] != texts["step_4"] == texts["step_4/rewrite"]
    page = html.unescape((tmp_path / "gallery.html").read_text())
    assert all(text in page for text in texts["step_4"])


@more
def test_an_evaluation_of_episodes_over_ray_is_the_same(edited: Any) -> None:
    lora = {"first": edited.checkpoint(1), "last": edited.checkpoint(STEPS)}
    keys = {"lora": lora, "roles": ["edit"], "images": 2, "trust": True}
    alone = gerl.evaluate(**keys)
    spread = gerl.evaluate(**keys, overrides=["cluster.launcher=ray", "cluster.num_workers=2"])
    assert list(alone.results["total"]) == ["base", "first", "first/edit", "last", "last/edit"]
    order = {(row.variant, row.prompt_id, row.index): row for row in spread.rows}
    assert len(order) == 5 * 4 * 2 and all(order[r.variant, r.prompt_id, r.index] == r for r in alone.rows)


@pytest.mark.parametrize(
    ("keys", "code", "said"),
    [
        (["lora=LAST", "roles=paint"], 2, "roles=paint: .*draw, edit"),
        (["lora=LAST/lora", "roles=edit"], 2, "roles=edit: .*remove it"),
        (["lora.all=LAST", "lora.draw=LAST/lora"], 2, "one by one"),
        (["lora=BARE"], 2, "no roles/edit/lora; .*/lora for the LoRA of draw"),
        (["lora=LAST", "experiment=plain"], 2, "config.yaml"),
        (["lora=LAST", "model.lora_rank=2"], 1, "the role draw .*experiment="),
        (["lora=TEXT/roles/rewrite/lora"], 2, "roles=rewrite"),
        (["lora=LAST", "episode=styled"], 2, "'style' is not a column"),
    ],
)
def test_what_cannot_be_evaluated_gets_a_sentence(
    keys: list[str], code: int, said: str, edited: Any, rewritten: Any, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    bare, last = tmp_path / "run" / "checkpoints" / "step_4", edited.checkpoint(STEPS)
    shutil.copytree(last, bare)
    shutil.rmtree(bare / "roles")
    config = (edited.folder / "config.yaml").read_text()
    (bare.parents[1] / "config.yaml").write_text(config)
    (tmp_path / "styled.yaml").write_text(config.replace("- role: edit\n", "- role: edit\n    request: in {style}\n"))
    places = {"LAST": last, "BARE": bare, "TEXT": rewritten.checkpoint(STEPS)}
    arguments = [f"out={tmp_path / 'out'}", "trust=true", *keys]
    for name, path in places.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    arguments = [a.replace("episode=styled", f"experiment={tmp_path / 'styled.yaml'}") for a in arguments]
    assert evaluate(arguments) == code
    assert re.search(said, capsys.readouterr().err)
