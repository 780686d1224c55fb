"""benchmarks/gpu.py: its dry run, its table, and which recipes docs/tested.md says were run on a GPU."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu
import gpu_cases
import pytest
import torch
from drills import more

from gerl.commandline.composition import experiments
from gerl.preflight.sizing.hardware import GPUS

ABOUT = {"device": "a CPU", "dry_run": True, "command": "", "software": {"packages": {"torch": "0"}}}
ON_CPU = gpu.Setting("cpu", True, 1, 0, None, None, ABOUT)
SD3, FLUX, QWEN = gpu_cases.TINY_CASES.values()
TESTED = Path(__file__).resolve().parents[3] / "docs" / "tested.md"
LEVELS = ("never run", "random weights on a GPU", "published weights")


def measured(case: gpu_cases.Case, *names: str, setting: gpu.Setting = ON_CPU) -> list[gpu.Row]:
    known, kept = gpu_cases.variants(dry=setting.dry), list[gpu.Row]()
    rows = gpu.run([case], [known[name] for name in names], setting, kept.append)
    assert rows == kept and [row["variant"] for row in rows] == list(names)
    return rows


@more
def test_a_variant_that_runs_has_all_figures_and_one_that_fails_a_reason() -> None:
    setting = replace(ON_CPU, peak=1e12)
    names = ("plain", "all-reduce", "sampling.cache=first_block", "model.attention=flash", "rollout.quantize=fp8")
    plain, reduced, cached, *failed = measured(FLUX, *names, setting=setting)
    for phase, predicted in (("rollout", 1e9), ("update", 6e8)):
        work = plain["figures"][phase]
        assert work["images_s"] == pytest.approx(2 / work["seconds"][0]) and work["flops"] == pytest.approx(
            predicted, rel=0.05
        )
        assert work["share"] == pytest.approx(work["flops"] * work["images_s"] / 1e12)
        assert work["peak"] is None and work["predicted_peak"] > 0  # the allocator of a CPU does not tell
    assert plain["figures"]["ratio_deviation"] < 1e-5 and cached["figures"]["ratio_deviation"] < 1e-5
    assert cached["figures"]["rollout"]["share"] is None
    assert reduced["refused"] is None, reduced["refused"]
    assert reduced["figures"]["bytes"] == 4 * 21504 and reduced["figures"]["bytes_s"] > 0
    for row, key in zip(failed, names[3:], strict=True):
        assert row["figures"] is None and key in row["refused"]
    for row in (plain, reduced, cached, *failed):
        assert row["recipe"] == "flux1_dev_pickscore" and row["date"] and row["device"] == "a CPU"


@more
def test_in_half_precision_as_on_a_gpu() -> None:
    case = replace(SD3, keys=(*SD3.keys, "model.dtype=bfloat16"))
    (row,) = measured(case, "plain")
    assert row["refused"] is None and row["figures"]["ratio_deviation"] < 1e-3


def test_operations_are_those_that_the_sizing_counts() -> None:
    (row,) = measured(QWEN, "profile")
    assert row["refused"] is None
    figures = row["figures"]
    for phase, told in figures["predicted"].items():
        assert figures["profile"][phase]["flops"] == pytest.approx(told * figures["images"], rel=1e-6)
    assert "qwen_image_tiny, 2 images" in gpu.table([row])


def test_a_case_that_cannot_be_sized_and_a_device_that_fails_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(FLUX, changes=FLUX.changes | {"vae": {"block_out_channels": [7, 7, 7, 7]}})
    (row,) = measured(broken, "plain")
    assert row["figures"] is None and row["refused"].startswith("it cannot be sized: ")
    monkeypatch.setattr(gpu, "works", lambda device: False)
    monkeypatch.setattr(gpu, "facts_of", lambda case, device: None)
    assert measured(FLUX, "plain")[0]["refused"] == gpu.UNUSABLE


def test_the_recipe_keeps_its_own_micro_batch() -> None:
    known, case = gpu_cases.variants(dry=False), gpu_cases.CASES["flux1_dev_1024"]
    plain, recipe = (gpu_cases.config_of(case, known[name], 1) for name in ("plain", "recipe"))
    assert (plain.rollout.micro_batch_size, plain.actor.micro_batch_size) == (1, 1)
    assert recipe.rollout.micro_batch_size == 8 and recipe.sampling.height == recipe.sampling.width == 1024
    assert recipe.model.gradient_checkpointing and not plain.model.gradient_checkpointing
    assert plain.model.lora_rank == 64


def test_names_of_devices_are_of_gpus_on_record() -> None:
    assert set(gpu_cases.DEVICES.values()) <= set(GPUS)
    assert not {"NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A10G"} & set(gpu_cases.DEVICES)


def test_a_wrong_name_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--dry-run", "flux2"]) == 2
    assert "flux2" in capsys.readouterr().err


def work(share: float | None = None) -> dict[str, Any]:
    return asdict_of(gpu.Work(2.0, [1.0], 1e12, share, 3_000_000_000, 2.5e9))


def asdict_of(found: gpu.Work) -> dict[str, Any]:
    return dict(vars(found))


def row_on_gpu(variant: str, figures: dict[str, Any] | None, refused: str | None = None) -> gpu.Row:
    return {
        "case": "sd35_medium_512", "recipe": "sd35_medium_ocr", "variant": variant, "keys": [], "figures": figures,
        "refused": refused, "date": "", **ABOUT, "device": "NVIDIA X", "dry_run": False, "command": "python x",
    }  # fmt: skip


def test_the_table_and_its_way_into_the_page(tmp_path: Path) -> None:
    results, page = tmp_path / "gpu.json", tmp_path / "README.md"
    page.write_text(f"before\n{gpu.BEGIN}\nold\n{gpu.END}\nafter\n")
    ran = {"images": 4, "rollout": work(0.5), "update": work(0.46), "ratio_deviation": 0.0, "notes": ["some note"]}
    gpu.keep_row(results, row_on_gpu("plain", None, "an earlier one"))
    gpu.keep_row(results, row_on_gpu("plain", ran))
    gpu.keep_row(results, row_on_gpu("rollout.quantize=fp8", None, "no kernel"))
    assert len(results.read_text().splitlines()) == 2 + 2
    gpu.write_table(results, page)
    text = page.read_text()
    assert "| sd35_medium_512 | plain | 4 | 2 | 50 % | 2 | 46 % | 3 (2.5) | 3 (2.5) | 0.0e+00 |" in text
    assert "rollout: 0 of 1 reach the goal, 55 %" in text and "update: 1 of 1 reach the goal, 45 %" in text
    assert "`rollout.quantize=fp8`: no kernel" in text and "`plain`: some note." in text and "an earlier" not in text
    assert text.startswith("before\n") and text.endswith("after\n") and "Made on NVIDIA X" in text
    gpu.keep_row(results, row_on_gpu("plain", ran) | {"dry_run": True, "device": "a CPU"})
    with pytest.raises(gpu.GerlError, match="dry run"):
        gpu.write_table(results, page)


def test_the_page_has_the_table_of_the_results() -> None:
    rows = gpu.read_rows(gpu.RESULTS)
    assert not any(row["dry_run"] for row in rows)
    assert f"{gpu.BEGIN}\n\n{gpu.table(rows)}\n\n{gpu.END}" in gpu.README.read_text(encoding="utf-8")


def test_every_recipe_says_how_far_it_is_verified() -> None:
    """And none says more than the results on record do."""
    page = TESTED.read_text(encoding="utf-8").partition("## How far the recipes are verified")[2]
    section = page.partition("\n## ")[0].replace("\n  ", " ")
    levels = dict(re.findall(r"^\* `([^`]+)`: (.*)$", section, re.MULTILINE))
    assert tuple(levels) == LEVELS
    stated = {recipe: level for level, names in levels.items() for recipe in re.findall(r"`(\w+)`", names)}
    assert list(stated) == sorted(name for name in experiments() if name not in ("plain", "signs"))
    assert sum(len(re.findall(r"`\w+`", names)) for names in levels.values()) == len(stated)
    ran = {row["recipe"] for row in gpu.read_rows(gpu.RESULTS) if "rollout" in (row["figures"] or {})}
    assert {recipe for recipe, level in stated.items() if level == LEVELS[1]} <= ran
    assert not {recipe for recipe, level in stated.items() if level == LEVELS[0]} & ran


@pytest.mark.gpu
def test_a_case_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = ["sd35_medium_512", "--variants", "plain", "all-reduce", "--repetitions", "1", "--batch", "1"]
    assert gpu.main([*command, "--out", str(out)]) == 0
    plain, reduced = json.loads(out.read_text())
    assert plain["refused"] is None and reduced["refused"] is None
    assert plain["device"] == torch.cuda.get_device_name(0) and not plain["dry_run"]
    for phase in ("rollout", "update"):
        found = plain["figures"][phase]
        assert found["images_s"] > 0 and 0.7 < found["peak"] / found["predicted_peak"] < 1.3
    assert plain["figures"]["ratio_deviation"] < 1e-3 and reduced["figures"]["backend"] == "nccl"
