"""Settings of the whole suite: one thread (the tensors are tiny, and sums keep their order), reproducible examples."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from drills import ALL
from hypothesis import settings

from gerl.utils.imports import importing
from gerl.utils.versions import has

if has("diffusers", "0.37"):  # older ones cannot be imported beside it
    sys.path.append(str(Path(sys.prefix) / "torchao"))  # tests/apart.py says why; diffusers looks for it when imported
with importing():
    import torch

    if "PYTEST_XDIST_WORKER" in os.environ:  # the libraries that most tests need; who only hands them out does without
        import diffusers.models.transformers  # noqa: F401
        import peft  # noqa: F401
        import transformers  # noqa: F401

if "XDG_STATE_HOME" not in os.environ:  # where the studio keeps a key of the user
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="gerl-state-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
# a shell's nohup and & ignore these, as then do all processes that tests start
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
gc.set_threshold(100_000)  # after every 700 objects, as is usual, the collector takes a fiftieth of the time


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    """One thread again: a run in this process takes all cores, and where two processes do, every sum waits for both."""
    torch.set_num_threads(1)
    return (yield from pytest_runtest_call())  # skips what is too old for a fixture


@pytest.fixture
def one_core() -> Iterator[None]:
    """One core for this process and those it starts: a run of theirs takes as many threads as there are cores.

    Where two processes test, the threads of tiny tensors wait for each other most of the time.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if cores:
        os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    yield
    if cores:
        os.sched_setaffinity(0, cores)


IN_CI = {  # files that are left to CI, unless one is named
    "e2e": """algorithms bare_environment data distillation early endings evaluate export full given guard health heard
    hub_export layout preflight presets quantised recipes rehearsal report rewards run_folder savings score
    services sharded_zoo signal site split_groups staleness start_lora suites sweep training wheel workers""",
    "unit/evaluate": "suites",
    "unit/examples": "cluster recipes torch_reward_model",
    "unit/model": "quantization sharding sharding_context",
    "unit/preflight": "sizing",
    "unit/program": "recipes",
    "unit/run/trackers": "packages process",
    "unit/trainer": "imports run_folder",
    "unit/workers": "memory",
}
left = [f"{folder}/test_{name}.py" for folder, names in IN_CI.items() for name in names.split()]
collect_ignore = [] if ALL else left
CASES = 2  # of a parametrised test that run locally
settings.register_profile("gerl", deadline=None, derandomize=True)
settings.register_profile("local", settings.get_profile("gerl"), max_examples=25)
settings.load_profile("gerl" if ALL else "local")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU; locally run `CASES` cases of each parametrised test, unless it is named."""
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu") is not None:  # keywords hold the names of folders as well
                item.add_marker(skip)
    if ALL or config.option.keyword or any("::" in argument for argument in config.args):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    spread = {id(c[round(i * (len(c) - 1) / (CASES - 1))]) for c in cases.values() for i in range(CASES)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in spread])
    items[:] = [item for item in items if id(item) in spread]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skip a test of what the installed packages are too old for, with that reason."""
    try:
        return (yield)
    except Exception as error:
        from newer import why_skipped

        if reason := why_skipped(error):
            pytest.skip(reason)
        raise
