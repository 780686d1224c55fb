"""What is known of a scheduler from its file is what the engine says of its class."""

import inspect
import re
from typing import Any, get_args

import diffusers
import pytest
from zoo.entries import ENTRIES

from gerl.config import Config, SamplingConfig
from gerl.config.blocks import KernelName, SigmaSpacing, SolverName
from gerl.config.samplers import (
    CONSISTENCY,
    DDIM,
    EDM,
    FLOW,
    FLOW_LCM,
    FLOW_MAP,
    KINDS,
    WITHOUT_KERNEL,
    WITHOUT_SIGMAS,
    Scheduler,
    check_sampler,
    choose,
    misfits,
)
from gerl.engine.transitions import check_scheduler, family
from gerl.errors import ConfigError, ModelError
from gerl.model.prompts import check_sigmas
from gerl.model.schedulers import trainable_scheduler

FAMILIES = {"euler": FLOW, "flow": FLOW, "flow_lcm": FLOW_LCM, "trigflow": CONSISTENCY, "lcm": CONSISTENCY,
            "tcd": CONSISTENCY, "edm": EDM, "flow_map": FLOW_MAP, "ddim": DDIM}  # fmt: skip
PREDICTIONS = (None, "v_prediction", "flow_prediction")
FLOW_SIGMAS = {"use_flow_sigmas": True}
SCHEDULERS = [name for name in dir(diffusers) if name.endswith("Scheduler") and name != "SchedulerMixin"]


def read(scheduler: Any) -> Scheduler:
    return Scheduler.read({**scheduler.config, "_class_name": type(scheduler).__name__})


def made(name: str, prediction: str | None) -> Any:
    """The scheduler; None if the class has no such setting."""
    kind = getattr(diffusers, name)
    accepted = inspect.signature(kind.__init__).parameters
    settings = {} if prediction is None else {"prediction_type": prediction}
    if prediction == "flow_prediction" and "use_flow_sigmas" in accepted:
        settings |= FLOW_SIGMAS
    return kind(**settings) if settings.keys() <= accepted.keys() else None


def test_every_scheduler_of_diffusers_is_of_the_kind_that_the_engine_makes_of_it() -> None:
    wrong = [f"{name}: of no kind" for name in SCHEDULERS if name not in KINDS and name not in WITHOUT_KERNEL]
    for name in SCHEDULERS:
        for prediction in PREDICTIONS:
            try:
                own = made(name, prediction)
                trained = None if own is None else trainable_scheduler(own)
            except ModelError:
                trained = None
            except (ImportError, TypeError):  # a package is missing, or an argument
                continue
            if own is None or (trained is None and (name in KINDS or prediction == PREDICTIONS[-1])):
                continue
            expected = None if trained is None else FAMILIES[str(family(trained))]
            found = read(own)
            if found.kind is not expected or (expected is None) != bool(found.obstacles):
                wrong.append(f"{name} with {prediction}: {found.kind}, not {expected}")
    assert not wrong, "\n".join(wrong)


def outcomes(scheduler: Any, sampling: SamplingConfig) -> tuple[bool, bool]:
    """Whether the engine refuses the scheduler with these settings, and whether its file is refused."""
    found = read(scheduler)
    try:
        check_scheduler(scheduler, sampling.kernel, sampling.noise_level, sampling.solver)
        check_sigmas(scheduler, sampling)
    except ModelError:
        return True, bool(found.obstacles or misfits(sampling, found))
    return False, bool(found.obstacles or misfits(sampling, found))


def test_a_file_is_refused_with_what_the_engine_refuses() -> None:
    makers: dict[str, dict[str, Any]] = {
        "FlowMatchEulerDiscreteScheduler": {"stochastic_sampling": True}, "FlowMatchLCMScheduler": {},
        "LCMScheduler": {"thresholding": True}, "TCDScheduler": {"thresholding": True}, "SCMScheduler": {},
        "EDMEulerScheduler": {}, "DDIMScheduler": {"thresholding": True},
    }  # fmt: skip
    wrong = []
    for name, obstacle in makers.items():
        for kernel in get_args(KernelName):
            for solver in get_args(SolverName):
                for sigmas in get_args(SigmaSpacing):
                    sampling = SamplingConfig(kernel=kernel, solver=solver, sigmas=sigmas)
                    engine, file = outcomes(getattr(diffusers, name)(), sampling)
                    wrong += [f"{name} {kernel} {solver} {sigmas}: {engine} {file}"] * (engine != file)
        if obstacle:
            sampling = SamplingConfig(kernel="ode")
            assert outcomes(getattr(diffusers, name)(**obstacle), sampling) == (True, True), name
    snr = diffusers.DDIMScheduler(rescale_betas_zero_snr=True)
    assert outcomes(snr, SamplingConfig(kernel="ddim")) == (True, True)
    assert not wrong, "\n".join(wrong)


def test_pipelines_that_take_no_noise_levels_are_known_by_name() -> None:
    """Those of the zoo with flow matching, and that no other of diffusers is taken for one of them."""
    taking = {}
    for name in dir(diffusers):
        if name.endswith("Pipeline") and isinstance(kind := getattr(diffusers, name), type):
            taking[name] = "sigmas" in inspect.signature(kind.__call__).parameters
    assert not [name for name, takes in taking.items() if takes and WITHOUT_SIGMAS.match(name)]
    pipes = {entry.name: entry for entry in ENTRIES if not taking.get(entry.name, True)}
    unknown = [name for name, entry in pipes.items() if not WITHOUT_SIGMAS.match(name) and is_flow(entry.build())]
    assert not unknown


def is_flow(pipe: Any) -> bool:
    return family(trainable_scheduler(pipe.scheduler)) in ("euler", "flow", "flow_lcm", "flow_map")


def test_the_first_that_the_scheduler_allows_is_chosen() -> None:
    def chosen(name: str, pipeline: str = "", **sampling: Any) -> list[str]:
        return list(choose(sampling, Scheduler.read({"_class_name": name}, pipeline)).values())

    every = {"kernel": "auto", "solver": "auto", "sigmas": "auto"}
    assert chosen("FlowMatchEulerDiscreteScheduler", **every) == ["flow_sde", "dpm2", "linear"]
    assert chosen("FlowMatchEulerDiscreteScheduler", "WanPipeline", **every) == ["flow_sde", "dpm2", "scheduler"]
    assert chosen("PNDMScheduler", **every) == ["ddim", "euler", "scheduler"]
    assert chosen("EDMEulerScheduler", **every) == ["flow_sde", "euler", "scheduler"]
    assert chosen("LCMScheduler", **every) == ["cps", "euler", "scheduler"]
    assert chosen("OfTheirOwn", **every) == ["flow_sde", "dpm2", "linear"]
    listed = ["dance_sde", "auto"]
    assert chosen("FlowMatchEulerDiscreteScheduler", kernel=listed) == ["dance_sde"]
    assert chosen("TCDScheduler", kernel=listed) == ["cps"] and chosen("DDIMScheduler", kernel=listed) == ["ddim"]
    assert chosen("DDIMScheduler", kernel="flow_sde", solver="dpm2") == []  # what is typed stays, and is refused
    for wrong in (["dance_sde", "other"], []):
        with pytest.raises(ConfigError, match=r"sampling\.kernel=.* one of .*auto"):
            chosen("DDIMScheduler", kernel=wrong)


def test_all_reasons_are_in_one_sentence() -> None:
    ddim = Scheduler.read({"_class_name": "DDIMScheduler"})
    sampling = SamplingConfig(kernel="flow_sde", solver="dpm2", sigmas="linear", compression=0.5)
    with pytest.raises(ConfigError) as error:
        check_sampler(Config(sampling=sampling), ddim)
    words = r"\(DDIM\).*kernel=flow_sde.*ddim or ode; .*solver=dpm2.*euler; .*sigmas=linear.*compression=0.5"
    assert re.search(words, str(error.value))
    with pytest.raises(ConfigError, match=r"VQDiffusionScheduler.*no transition kernel.*model\.parts"):
        check_sampler(Config(), Scheduler.read({"_class_name": "VQDiffusionScheduler"}))
    check_sampler(Config(), Scheduler.read({"_class_name": "OfTheirOwn"}))
