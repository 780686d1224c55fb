"""The training loop: plan, sample, score, credit, update, conclude.

    prompts --plan--> tasks --Fleet.sample--> images --RewardManager--> scores --credit--> credit [B, T]
                        |                                                                       |
              trajectories stay on the workers ------------------Fleet.accumulate, step--------+--> metrics, new weights

A `Step` is the value that moves through it, a `Run` what it works with: a fleet is all the processes that hold the
model (`gerl.workers.fleet`), and the reward manager those of the scorers. Everything optional is an extension
(`gerl.trainer.extensions`). What waits for what:

    sampler   for a task, of which it has two: the current one and the next; while scorers lag behind, it gets none
    scorer    for the images of a micro-batch, as soon as they are sampled
    update    for all scores of its step; an extension may begin with the groups that are scored
    next step for the update, or with `trainer.staleness` for that of so many steps before
    validate  for the update; rollouts of the next steps come first
    save      for the previous save
"""

import logging
from collections.abc import Callable, Iterator

from gerl.commandline import signals
from gerl.progress import Stopwatch, waiting
from gerl.rewards.rollouts import PendingRollout
from gerl.trainer.recovery import LOSSES, admit, recover, remember, roll_back
from gerl.trainer.roles import update_roles
from gerl.trainer.run import Run
from gerl.trainer.step import Metrics, RollBack, Save, Step, Stop, credit_of, usable_rewards
from gerl.trainer.validation import look, validate

logger = logging.getLogger(__name__)


def train(run: Run) -> Iterator[Step]:
    """Train from the last finished step to the last one; yields each concluded step.

    If workers die during a step, they are replaced and the step is repeated, bit for bit.
    """
    taking = take_ahead if run.config.trainer.staleness else take
    for step in remaining_steps(run):
        if (step.taken or survive(taking, run, step)) and conclude(run, step):
            yield step


def take(run: Run, step: Step) -> None:
    """Sample, score and update; afterwards `run.state` is the state after `step`."""
    admit(run, step.number)
    with step.watch("step"):
        run.rollouts.sync(run.state.step, step)
        rollout: PendingRollout | None = run.sample(step.number)
        while rollout is not None:  # once, unless an extension has more to sample
            run.rollouts.wait_until_sampled(rollout, step)
            score(run, rollout, step)
            rollout = further(run, step)
        learn(run, step)
    remember(run)


def take_ahead(run: Run, step: Step) -> None:
    """Take a step sampled with the weights of `step.lag` steps ago (off-policy lag); samplers and scorers stay busy.

    The next `trainer.staleness` steps are sampled before it is scored and trained on.
    """
    rollouts = run.rollouts
    admit(run, step.number)
    step.lag = min(run.config.trainer.staleness, run.state.step)
    last = min(step.number + run.config.trainer.staleness, run.plan.last_step)
    with step.watch("step"):
        rollouts.sync(run.state.step, step)
        for number in range(step.number, last + 1):
            if number not in rollouts.ahead:
                rollouts.ahead[number] = run.sample(number)
            if number == step.number or run.config.cluster.layout == "hybrid":
                rollouts.wait_until_sampled(rollouts.ahead[number], step)
        score(run, rollouts.ahead.pop(step.number), step)
        while (rollout := further(run, step)) is not None:
            rollouts.wait_until_sampled(rollout, step)
            score(run, rollout, step)
        learn(run, step)
    remember(run)


def learn(run: Run, step: Step) -> None:
    """Credit the scored samples of a step and train on them."""
    run.fleet.sampled(step.number)
    step.rewards, step.metrics = usable_rewards(run.config, step.scores)
    run.notify("rewarded", step)
    step.credit = credit_of(run.config, run.algorithm, step.scores, step.rewards)
    run.notify("credited", step)
    step.images.clear()  # frees trajectories before the step ends
    with signals.deferred():
        step.metrics |= run.rewards.metrics() | update(run, step)
        run.notify("updated", step)
        run.finish(step)


def conclude(run: Run, step: Step) -> bool:
    """Validate, log and save as due; returns False if the run has returned to an earlier step."""
    wanted = any(run.notify("due", step)) and run.plan.held_out
    whole = wanted or run.plan.validates(step.number)
    if whole or step.number in run.plan.looks:
        with step.watch("step"):
            observed = survive(validate if whole else look, run, step)
        if not observed:
            return False
    with signals.deferred():
        run.log(step)
        run.notify("logged", step)
    run.fleet.writer.poll()
    for directive in step.directives:
        if isinstance(directive, RollBack):
            roll_back(run, directive)
            return False
    regular = step.number > 0 and run.plan.is_due(step.number, run.config.checkpoint.every)
    if (regular or Save() in step.directives) and not survive(lambda run, step: run.save(), run, step):
        return False
    for directive in step.directives:
        if isinstance(directive, Stop):
            raise directive.error
    run.notify("concluded", step)
    return True


# --- The parts of a step


def remaining_steps(run: Run) -> Iterator[Step]:
    """Iterate over the remaining steps; after a rollback from the earlier step again."""
    timeline = run.fleet.timeline
    run.notify("stepping")
    if run.state.step == 0 and run.plan.held_out:
        yield Step(0, Stopwatch(timeline), taken=True)
    while run.state.step < run.plan.last_step or run.state.unlogged:
        run.notify("stepping")
        watch = Stopwatch(timeline)
        if unlogged := run.state.unlogged:  # trained, but stopped before it was concluded
            yield Step(run.state.step, watch, taken=True, metrics=dict(unlogged))
        else:
            yield Step(run.state.step + 1, watch)


def survive(part: Callable[[Run, Step], None], run: Run, step: Step) -> bool:
    """Run `part`, again if workers die; returns False if the run has returned to an earlier step."""
    before = run.state.step
    while True:
        try:
            part(run, step)
            return True
        except LOSSES as error:
            recover(run, error)
        if run.state.step != before:
            return False
        step.restart()


def score(run: Run, rollout: PendingRollout, step: Step) -> None:
    """Wait for the scores of a rollout and add both to the step."""
    waits = run.notify("scoring", step, rollout)
    meanwhile = next((called for called in waits if called is not None), None)
    run.rollouts.score(rollout, step, meanwhile, bool(run.plan.dataset_images))


def further(run: Run, step: Step) -> PendingRollout | None:
    """Return the next rollout of a step whose earlier ones are scored; None: there is no other."""
    return next((rollout for rollout in run.notify("scored", step) if rollout is not None), None)


def update(run: Run, step: Step) -> Metrics:
    """Take the step's optimizer steps while samplers and scorers work on later steps."""
    what = "LoRA" if run.config.model.train == "lora" else "weights"
    trained = run.fleet.timeline.span("update", *[f"worker {i}" for i in run.fleet.trainers.numbers])
    announced = waiting(f"updating the {what}", after=run.rollouts.patience)
    with run.rollouts.served(), announced, step.watch("update"), trained:
        return update_roles(run.roles, step)
