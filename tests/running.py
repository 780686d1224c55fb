"""A run of the trainer in this process, as an object to look into."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from gerl.cluster import Cluster
from gerl.config import Config
from gerl.protocol import Prompt
from gerl.trainer.loop import train
from gerl.trainer.plan import Plan
from gerl.trainer.recovery import rescued
from gerl.trainer.run import Run
from gerl.trainer.start import begin_run, load_run


def loaded(config: Config, folder: Path, cluster: Cluster, prompts: Sequence[Prompt]) -> Run:
    """A run whose model is loaded."""
    return load_run(config, folder, cluster, Plan(config, prompts), {})


def trained(
    config: Config, folder: Path, cluster: Cluster, prompts: Sequence[Prompt], held_out: Sequence[Prompt] = ()
) -> Run:
    """A run that has taken all its steps."""
    run = load_run(config, folder, cluster, Plan(config, prompts, held_out), {})
    begin_run(run)
    with rescued(run):
        deque(train(run), maxlen=0)
    return run
