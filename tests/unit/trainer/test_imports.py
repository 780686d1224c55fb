"""The imports of the driver: it holds no model, and the libraries of models take seconds."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DRIVER = """
import sys
import gerl.trainer.main_flowgrpo, gerl.trainer.launch, gerl.trainer.loop, gerl.trainer.start
import gerl.trainer.extensions as extensions
from importlib import import_module
[import_module(f'gerl.trainer.extensions.{name.partition(":")[0]}') for name in extensions.EXTENSIONS]
import gerl.algorithms, gerl.run.card, gerl.run.report
print(*sys.modules)
"""
# the last two come with what divides weights; they import a system of computer algebra
WITHOUT = "diffusers transformers peft accelerate torch._dynamo torch.distributed.tensor torch.distributed.fsdp".split()


def test_the_driver_imports_torch_and_no_library_of_models() -> None:
    done = subprocess.run([sys.executable, "-c", DRIVER], cwd=ROOT, capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert {"torch", "gerl.workers.worker"} <= found and "ray" not in found  # which a run without it imports never
    assert [name for name in WITHOUT if name in found] == []
