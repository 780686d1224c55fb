"""benchmarks/gpu.py --minutes and --bundle: steps within a time, what is kept, what is skipped, wheels, the report."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import gpu_bundle
import gpu_profile
import gpu_report
import gpu_steps
import pytest
from gpu_session import DONE, FAILED, TIME_OUT, Session, Step, results, steps_of
from gpu_table import UNUSABLE
from packaging.requirements import Requirement
from thin_environment import tiny_package

BENCHMARKS = Path(gpu_bundle.__file__).parent
WORKS = "import pathlib, sys; pathlib.Path(sys.argv[1]).open('a').write('x')"


def step(name: str, code: str, *more: str, least: float = 0.0, limit: float = 60.0, needs: str | None = None) -> Step:
    return Step(name, ("-c", code, *more), least, limit, needs)


def session(out: Path, *steps: Step, seconds: float = 600.0) -> Session:
    return Session(out, steps, seconds, os.environ)


def test_steps_run_in_order_and_only_those_that_are_not_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    steps = [
        step("good", WORKS, str(good)),
        step("bad", f"{WORKS}; sys.exit('no such thing')", str(bad)),
        step("after", WORKS, str(good), needs="bad"),
        step("long", WORKS, str(good), least=1e6),
    ]
    for _ in range(2):
        session(tmp_path, *steps).run()
    rows = results(tmp_path)
    assert [(row["step"], row["state"]) for row in rows] == [("good", DONE), ("bad", FAILED), ("bad", FAILED)]
    assert rows[1]["why"] == "no such thing" and good.read_text() == "x" and bad.read_text() == "xx"
    said = capsys.readouterr().out
    assert "good: was done before" in said and "after: left out, since bad" in said and "long: no time left" in said


def test_a_step_has_a_limit_and_what_it_started_ends_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
    code = f"{child}; open(sys.argv[1], 'w').write(str(p.pid)); time.sleep(99)"
    session(tmp_path, step("slow", code, str(pid), limit=3.0), step("next", "pass")).run()
    assert [row["state"] for row in results(tmp_path)] == [TIME_OUT, DONE]
    assert ends(pid)


def ends(pid: Path) -> bool:
    """Whether the process of the number in a file ends within seconds; one that waits for its parent has."""
    deadline, place = time.monotonic() + 20, Path(f"/proc/{pid.read_text()}/cmdline")
    while time.monotonic() < deadline:
        if not place.exists() or not place.read_bytes():
            return True
        time.sleep(0.05)
    return False


RUNS = """
import sys
from pathlib import Path
import gpu_session as s
out = Path(sys.argv[1])
s.GPU_FILES = ("/dev/null",)
s.steps_of = lambda out, dry: [
    s.Step("first", ("-c", "pass"), 0, 60),
    s.Step("second", ("-c", "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(99)"), 0, 90),
]
sys.exit(s.main(["--minutes", "3", "--out", str(out)]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_session_that_is_stopped_keeps_what_it_measured(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUNS, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=BENCHMARKS
    )
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert ends(pid)
    states = {row["step"]: row["state"] for row in results(tmp_path)}
    if number == signal.SIGKILL:
        assert process.returncode == -number and states == {"first": DONE}
    else:
        assert process.returncode == 128 + number and states == {"first": DONE, "second": "stopped"}
        assert (tmp_path / "report.md").exists()


def test_of_a_case_only_the_variants_that_lack_are_measured(tmp_path: Path) -> None:
    (case,) = (s for s in steps_of(tmp_path, dry=False) if s.name == "sd35_medium_512")
    row = {"case": "sd35_medium_512", "variant": "plain", "refused": None, "figures": {}}
    broken = row | {"variant": "recipe", "refused": UNUSABLE}
    (tmp_path / "cases.json").write_text(json.dumps([row, broken]))
    command = session(tmp_path).left_of(case)
    assert command is not None and command[-1] == "images=32" and "recipe" in command and "plain" not in command


def test_every_case_and_variant_of_the_steps_is_known(tmp_path: Path) -> None:
    import gpu_cases

    for dry, cases in ((False, gpu_cases.CASES), (True, gpu_cases.TINY_CASES)):
        steps = steps_of(tmp_path, dry)
        assert len({s.name for s in steps}) == len(steps)
        for s in steps:
            assert s.case is None or (s.case in cases and s.case in s.command)
            assert set(s.variants) <= set(gpu_cases.variants(dry)) and s.least <= s.limit
            assert s.case or s.name in gpu_steps.STEPS


# --- wheels


def test_a_bundle_is_installed_where_something_of_it_lacks(tmp_path: Path) -> None:
    bundle, site = tmp_path / "bundle", tmp_path / "site"
    with pytest.raises(gpu_bundle.BundleError, match="--bundle"):
        gpu_bundle.install(bundle, site)
    tiny_package(bundle, "no_such_package", 2.5)
    assert gpu_bundle.install(bundle, site) == ["no_such_package"]
    assert "2.5" in (site / "no_such_package" / "__init__.py").read_text()
    (bundle / "other-1.0-cp27-cp27m-manylinux1_x86_64.whl").touch()
    with pytest.raises(gpu_bundle.BundleError, match="--python"):
        gpu_bundle.install(bundle, tmp_path / "again")


def test_what_is_here_in_this_or_a_newer_version_does_not_lack(tmp_path: Path) -> None:
    for name in ("diffusers-0.1.0-py3-none-any.whl", "hydra_core-999.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    assert gpu_bundle.lacking(tmp_path) == ["hydra_core"]


def required(names: Iterable[str]) -> set[str]:
    """Return `names` and what they require, and so on, in this environment."""
    found: set[str] = set()
    left = [gpu_bundle.canonical(name) for name in names]
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            lines = [Requirement(line) for line in metadata.requires(name) or []]
            left += [gpu_bundle.canonical(r.name) for r in lines if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


def test_a_bundle_completes_what_an_image_has() -> None:
    image, bundle = required(gpu_bundle.IMAGE), {gpu_bundle.canonical(name) for name in gpu_bundle.NEEDED}
    assert required([*bundle, "jinja2", "numpy", "pyyaml", "safetensors", "tqdm"]) - image <= bundle


def test_all_of_a_bundle_is_pinned() -> None:
    pins = gpu_bundle.pinned([*gpu_bundle.NEEDED, *gpu_bundle.OCR])
    assert "antlr4-python3-runtime==4.9.3" in pins and not any("torch" in pin or "ray" in pin for pin in pins)
    with pytest.raises(gpu_bundle.BundleError, match="no_such"):
        gpu_bundle.pinned(["no_such"])


# --- figures


def test_differences_of_metrics_are_relative_and_without_times() -> None:
    gpu = [{"step": 0, "val/mean": 1.0}, {"step": 1, "a": 2.0, "timing/step_s": 1.0, "b": float("nan")}]
    cpu = [{"step": 0, "val/mean": 1.0}, {"step": 1, "a": 1.0, "timing/step_s": 9.0, "b": 1.0}]
    found = gpu_steps.apart(gpu, cpu)
    assert found["by_metric"] == {"val/mean": 0.0, "a": 0.5, "b": float("inf")}
    assert found["by_step"] == {"0": 0.0, "1": float("inf")}


def test_calls_of_cuda_are_counted_by_what_they_do() -> None:
    names = ["cudaLaunchKernel", "cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize", "x"]
    assert gpu_profile.counted(names) == {"launches": 3, "copies": 1, "waits": 1}


PAGE = """# Page

## How far the recipes are verified

* `never run`: `a`, `sd35_medium_ocr`,
  `z`
* `random weights on a GPU`: none
* `published weights`: none
"""


def test_the_report_has_every_prediction_and_says_what_is_verified(tmp_path: Path) -> None:
    work = {"images_s": 2.0, "seconds": [1.0], "flops": 1e12, "share": 0.5, "peak": 3e9, "predicted_peak": 2.5e9}
    case = {"case": "c", "recipe": "a", "refused": None, "dry_run": False}
    looked = {"launches": 9, "copies": 1, "waits": 0, "flops": 2e12}
    rows = [
        case | {"variant": "plain", "figures": {"images": 4, "rollout": work, "update": work}},
        case | {"variant": "profile", "figures": {"images": 2, "profile": {"rollout": looked, "update": looked},
                                                   "predicted": {"rollout": 1e12, "update": 2e12}}},
    ]  # fmt: skip
    train = {"peak": 2e10, "predicted": {"phases": {"rollout": 1e10, "update": 1.6e10}}}
    steps = {"train": {"step": "train", "state": DONE, "figures": train, "why": None}}
    found = gpu_report.predictions(steps, rows)
    assert "| c, plain, rollout, 4 images | GB | 2.5 | 3 | +20.0% |" in found
    assert "| c, profile, rollout | TFLOP | 2 | 2 | +0.0% |" in found and "| TFLOP | 4 | 2 | -50.0% |" in found
    assert "| sd35_medium_ocr, `gerl train` | GB | 16 | 20 | +25.0% |" in found
    assert "TFLOP" not in gpu_report.memory_table(steps, rows)
    ran = gpu_report.verified(steps, rows)
    assert ran == {"a", "sd35_medium_ocr"}
    lists = "* `never run`: `z`\n* `random weights on a GPU`: `a`, `sd35_medium_ocr`\n* `published weights`: none"
    assert gpu_report.with_levels(PAGE, ran).endswith(lists + "\n")
    assert gpu_report.verified(steps, [row | {"dry_run": True} for row in rows]) == set()


def test_a_dry_run_and_nothing_are_not_for_the_pages(tmp_path: Path) -> None:
    with pytest.raises(gpu_report.ReportError):
        gpu_report.write_pages(tmp_path)
    (tmp_path / "cases.json").write_text(json.dumps([{"dry_run": True}]))
    with pytest.raises(gpu_report.ReportError):
        gpu_report.write_pages(tmp_path)


def test_measurements_come_into_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu

    for name in ("README", "TESTED", "MEMORY"):
        page = tmp_path / f"{name}.md"
        page.write_text(getattr(gpu_report, name).read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(gpu_report, name, page)
    monkeypatch.setattr(gpu_report, "RECORD", tmp_path / "record.jsonl")
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "gpu.json")
    work = {"images_s": 2.0, "seconds": [1.0], "flops": 1e12, "share": 0.5, "peak": 3e9, "predicted_peak": 2.5e9}
    row = {
        "case": "sd35_medium_512", "recipe": "sd35_medium_ocr", "variant": "plain", "refused": None, "dry_run": False,
        "figures": {"images": 8, "rollout": work, "update": work, "ratio_deviation": 0.0, "notes": []},
        "device": "NVIDIA X", "software": {"packages": {"torch": "2"}}, "command": "x", "keys": [], "date": "",
    }  # fmt: skip
    (tmp_path / "cases.json").write_text(json.dumps([row]))
    line = {"step": "ratio", "state": TIME_OUT, "seconds": 9.0, "why": None, "figures": {"plain": 0.25}}
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + '\n{"step": "signs", "st')
    gpu_report.write_pages(tmp_path)
    gpu_report.write_pages(tmp_path)
    readme, tested, memory = ((tmp_path / f"{name}.md").read_text() for name in ("README", "TESTED", "MEMORY"))
    assert "| sd35_medium_512 | plain | 8 | 2 | 50 % |" in readme and "* ratio: plain 2.5e-01; out of time" in readme
    assert "| sd35_medium_512, plain, update, 8 images | 2.5 | 3 | +20.0% |" in memory
    assert "* `random weights on a GPU`: `sd35_medium_ocr`\n* `published" in tested


def test_the_page_has_the_session_on_record() -> None:
    begin, end = gpu_report.SESSION
    page = gpu_report.README.read_text(encoding="utf-8")
    assert f"{begin}\n\n{gpu_report.told(gpu_report.lines_of(gpu_report.RECORD))}\n\n{end}" in page
