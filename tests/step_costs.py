"""Kernel launches, copies and synchronisations of a denoising step, counted on a simulated accelerator."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pretended
import tiny
import torch
from pretended import COUNTS, DEVICE
from zoo import checks
from zoo.base import Entry
from zoo.entries import ENTRIES

from gerl.engine import record, replay
from gerl.model.denoisers import find_denoisers

DEPTHS: dict[str, dict[str, Any]] = {  # numbers of layers of the real denoisers; their widths are tiny
    "StableDiffusion3Pipeline": {"num_layers": 24},
    "FluxPipeline": {"num_layers": 19, "num_single_layers": 38},
    "QwenImagePipeline": {"num_layers": 60},
    "WanPipeline": {"num_layers": 30},
    "StableDiffusionXLPipeline": {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (4, 8, 16),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (1, 2, 4),
        "layers_per_block": 2,
    },
}
STEPS = 4


@dataclass(frozen=True)
class Cost:
    """Of one denoising step between the first and the last of a call."""

    launches: int
    to_device: int  # copies
    waits: int  # synchronisations, and copies to the host
    own_copies: int  # those of gerl itself
    own_waits: int


def at_real_depth(build: Callable[[], Any], changes: dict[str, Any]) -> Any:
    """A tiny pipeline with a denoiser of as many layers as the published one has."""
    pipe = build()
    for name, denoiser in find_denoisers(pipe).items():
        made = type(denoiser).from_config({**denoiser.config, **changes}).eval()
        pipe.register_modules(**{name: made})
    return pipe


def costs(name: str, deep: bool) -> dict[str, Cost]:
    """Return the costs of `stock` pipeline, `record`, `bare` forward and backward passes, and `replay`."""
    entry = next(e for e in ENTRIES if e.name == name)
    if deep:
        entry = replace(entry, build=partial(at_real_depth, entry.build, DEPTHS[name]))
    pipe, _ = checks.build(entry)
    (denoiser,) = find_denoisers(pipe).values()
    with pretended.pretending():
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                pretended.movable(part).to(DEVICE)
        call = checks.call_for(entry, pipe, guided=True) | {"num_inference_steps": STEPS}
        generators = partial(tiny.generators, entry.batch)
        options = {"kernel": entry.kernel, "generators": generators()}
        _, first = record(pipe, call, **options)
        denoised: list[tuple[Any, Any]] = []
        places: list[int] = []

        def noted(_: Any, args: Any, kwargs: Any) -> None:
            denoised.append((args, kwargs))
            places.append(len(COUNTS.events))

        denoiser.register_forward_pre_hook(noted, with_kwargs=True)

        def counted(run: Callable[[], Any]) -> Cost:
            """The events of the second step: from its first call of the denoiser to that of the third."""
            denoised.clear()
            places.clear()
            with COUNTS.counting():
                run()
            each = len(places) // (STEPS if run in (stock, recorded) else STEPS - 1)
            start, end = places[each], places[2 * each]
            count, own = partial(COUNTS.total, since=start, until=end), partial(COUNTS.own, since=start, until=end)
            waits = count("sync") + count("to host")
            own_waits = own("sync").total() + own("to host").total()
            return Cost(count("launch"), count("to device"), waits, own("to device").total(), own_waits)

        def stock() -> None:
            pipe(**call, generator=generators())

        def recorded() -> None:
            nonlocal tape
            options["generators"] = generators()
            tape = record(pipe, call, probe=first.probe or False, **options)[1]

        def bare() -> None:
            for args, kwargs in given:
                output = denoiser(*args, **kwargs)
                (output[0] if isinstance(output, tuple) else output.sample).square().mean().backward()

        tape = first
        found = {"stock": counted(stock)}
        given = denoised[: len(denoised) // STEPS * (STEPS - 1)]
        found["record"] = counted(recorded)
        found["bare"] = counted(bare)
        found["replay"] = counted(lambda: replay(pipe, tape, lambda k, step: -step.log_prob.mean()))
    return found


def inside_the_denoiser(entry: Entry) -> tuple[list[str], Counter[str]]:
    """Return a pipeline's denoiser classes, and the synchronisations and copies within their calls in a rollout.

    Counts the second half of the calls: earlier ones may fill caches.
    """
    pipe, _ = checks.build(entry)
    denoisers = find_denoisers(pipe).values()
    spans: list[tuple[int, int]] = []
    with pretended.pretending():
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                pretended.movable(part).to(DEVICE)
        for denoiser in denoisers:
            denoiser.register_forward_pre_hook(lambda *_: spans.append((len(COUNTS.events), 0)))
            denoiser.register_forward_hook(lambda *_: spans.append((spans.pop()[0], len(COUNTS.events))))
        call = checks.call_for(entry, pipe, guided=entry.cfg is not None and "guided" not in entry.fails)
        with COUNTS.counting():
            record(pipe, call, kernel=entry.kernel, generators=tiny.generators(entry.batch), noise_level=checks.NOISE)
    kinds = ("sync", "to host", "to device")
    found = Counter({k: sum(COUNTS.total(k, *span) for span in spans[len(spans) // 2 :]) for k in kinds})
    return sorted({type(denoiser).__name__ for denoiser in denoisers}), +found
