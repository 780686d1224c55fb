"""Start a run: workers and scorers, the model, what is measured before the first step, and the checkpoint to resume."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gerl.algorithms import Algorithm
from gerl.algorithms.planning import plan_samples
from gerl.cluster import Cluster, Pending
from gerl.config import Config
from gerl.config.changes import settings_of
from gerl.config.configuration import saving_notes
from gerl.data.tables import unused_columns
from gerl.errors import ClusterError
from gerl.progress import Timeline, waiting
from gerl.protocol import ModelFacts
from gerl.rewards.checks import check_held_out_metrics
from gerl.rewards.gradients import with_absolute_paths
from gerl.rewards.manager import RewardManager, functions_of
from gerl.rewards.scorers.weights import offers
from gerl.rewards.total import describe_reward
from gerl.rewards.trial import try_scorers
from gerl.run.checkpoint import Checkpoint, RunState
from gerl.run.guard import FEWEST, fewest_changes, guard_scope, look_steps, watched_columns
from gerl.trainer.extensions import build_extensions
from gerl.trainer.overlong import without_overlong
from gerl.trainer.plan import Plan
from gerl.trainer.recovery import LOSSES, remember, restart_lost
from gerl.trainer.run import Run, first_role
from gerl.trainer.run_folder import RunFolder
from gerl.workers.fleet import LocalFleet, fleet_of
from gerl.workers.roles import RoleWorker
from gerl.workers.worker import PolicyWorker

logger = logging.getLogger(__name__)


def load_run(
    config: Config,
    run_dir: Path,
    cluster: Cluster,
    plan: Plan,
    identity: Mapping[str, str],
    checkpoint: Checkpoint | None = None,
    started: float | None = None,
) -> Run:
    """Start the workers, check the model, try the scorers and load the model that `checkpoint` needs.

    identity: digests of the prompts by key. started: a time of `time.perf_counter`.
    """
    state = RunState(identity=dict(identity), settings=settings_of(config))
    state.step = checkpoint.step if checkpoint else 0  # named in the message of a request to stop
    logger.info("reward: %s", describe_reward(config.reward.scorers))
    name, timeline = "/".join(run_dir.absolute().parts[-2:]), Timeline()
    # before the scorers, which share GPUs: Ray packs these, and would leave no room for a worker
    fleet = start_fleet(config, cluster, plan.steps, timeline, resumes=checkpoint is not None)
    rewards = RewardManager(config.reward, cluster, name, timeline)
    run = Run(config, run_dir, plan, fleet, rewards, build_extensions(config), state, started)
    run.notify("stepping")
    loading: list[Pending[ModelFacts]] = []
    try:
        fleet.check_model()
        if cluster.remote:  # in the background, while the scorers start
            loading = fleet.begin_loading(range(len(fleet.workers)))
    except (ClusterError, RuntimeError) as error:  # of a worker that died, or of its peers while they join
        restart_lost(run, error)
    with waiting("trying the scorers on grey images", fleet.downloads):
        sampled = plan.prompts if config.data.train_on == "rollouts" else plan.held_out
        columns = try_scorers(rewards, config, sampled, plan.held_out)
    check_held_out_metrics(config, plan.held_out, columns)
    if run.judges and len(plan.held_out) >= FEWEST and not config.episode.turns:
        plan.look_after(look_steps(plan.steps, config.validation.every))
    describe_guard(run, columns)
    run.notify("stepping")
    load_model(run, loading)
    describe_model(run)
    state.identity |= {"model.path": fleet.model.weights}
    plan.choose(*without_overlong(config, fleet, cluster.ranks if config.lockstep else 1, plan.prompts, plan.held_out))
    first = first_role(run)
    assigned = [roles for roles in run.notify("assigning", first) if roles is not None]
    run.set_roles(assigned[0] if assigned else {first.name: first})
    return run


def begin_run(run: Run, folder: RunFolder | None = None) -> None:
    """Make a loaded run ready for its next step, from the checkpoint of its `folder` if any."""
    if folder is not None:
        if folder.checkpoint is not None:
            run.load(folder.checkpoint)
        folder.resume_run()
    calibrate(run)
    run.open_log()
    remember(run)


def start_fleet(config: Config, cluster: Cluster, steps: int, timeline: Timeline, resumes: bool) -> LocalFleet:
    """Start the workers of a run of so many `steps`, without loading the model."""
    functions = functions_of(config.reward.scorers) if config.algorithm.needs.reward_gradient else {}
    cluster.send_by_value(functions.values())
    whole = trainer = with_absolute_paths(replace(config, model=config.model.for_resume()) if resumes else config)
    if cluster.training < cluster.processes and config.model.offload == "none":
        # trainers only call the denoiser: the other components stay in main memory
        trainer = replace(whole, model=replace(whole.model, offload="encoders"))
    total_updates, threads = steps * config.actor.updates, cluster.threads

    def arguments(rank: int) -> tuple[object, ...]:
        settings = trainer if rank < cluster.training else whole
        return settings, rank, cluster.worker_device(rank), threads, total_updates, functions

    workers = cluster.workers(
        "worker",
        RoleWorker if config.episode.turns else PolicyWorker,
        cluster.processes,
        arguments,
        gpus=cluster.gpus,
        threads=threads,
        together=cluster.ranks,
    )
    return fleet_of(config, cluster, workers, timeline)


def load_model(run: Run, begun: list[Pending[ModelFacts]]) -> None:
    """Load the model on all workers, or wait for the calls `begun` that do; replace workers that die meanwhile."""
    while True:
        try:
            run.fleet.set_up(range(len(run.fleet.workers)), begun)
            return
        except LOSSES as error:
            restart_lost(run, error)
            begun = []


def calibrate(run: Run) -> None:
    """Measure the numerical noise of the on-policy ratio, and warn of settings that cannot work."""
    config, plan = run.config, run.plan
    if not run.algorithm.needs.ratio or config.algorithm.cfg == "off":
        return
    samples = plan_samples(config, plan.prompts_of(1), 1, run.state.policy_version)
    task = Algorithm.plan(run.algorithm, samples)[0]
    with waiting(f"measuring the numerical noise of the ratio on {len(task.samples)} images"):
        first = next(iter(run.roles.values()))
        first.update.calibrate(task, run.fleet.cluster.ranks if config.lockstep else 1)


# --- What is said before the first step


def describe_guard(run: Run, columns: Sequence[str]) -> None:
    """Log what the guard sees, and scorers to watch if there is none; `columns`: those known from the trial."""
    config, plan, cluster = run.config, run.plan, run.fleet.cluster
    action, scored = config.guard.action, run.rewards.validation
    if scored and not any(scorer.weight for scorer in scored.values()):
        return  # people vote, or images are imitated: without a held-out reward nothing is compared with it
    named = [c for name in scored for c in (name, *(c for c in columns if c.startswith(f"{name}/")))]
    watched = watched_columns(asdict(config), named)
    fewest = fewest_changes(asdict(config), len(watched))
    logger.info("%s", guard_scope(watched, action, len(plan.held_out), run.judges, fewest, plan.looks))
    gpu = cluster.remote and cluster.device == "cuda"
    if not watched and action != "off" and plan.held_out and (offered := offers(plan.held_out, gpu)):
        logger.info("scorers that can be watched without a download: %s", " or ".join(offered))


def describe_model(run: Run) -> None:
    """Log the loaded model and known problems of its kind."""
    config, cluster, model, plan = run.config, run.fleet.cluster, run.fleet.model, run.plan
    columns = unused_columns([*plan.prompts, *plan.held_out], config, model.arguments)
    for sentence in filter(None, [cluster.note, *model.notes, *saving_notes(config), *columns]):
        logger.info("%s", sentence)
    for sentence in model.warnings:
        logger.warning("%s", sentence)
    ranks = f" of {cluster.ranks} ranks" if cluster.ranks > 1 else ""
    what = "LoRA of %s parameters on" if config.model.train == "lora" else "%s trained weights of"
    roles = ""
    if config.cluster.layout == "split":
        training, sampling = config.cluster.roles(cluster.num_workers)
        roles = f" ({sampling} for sampling, {training} for training)"
    logger.info(
        f"%s, {what} %s; %d worker(s)%s on %s%s; %d prompts, %d steps per epoch",
        *(model.pipeline, f"{model.trained_parameters:,}", " and ".join(model.denoisers)),
        *(cluster.num_workers, ranks, cluster.device, roles, len(plan.prompts)),
        plan.schedule.steps_per_epoch,
    )
