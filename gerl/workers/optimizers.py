"""The optimizer of the LoRA: AdamW, or AdamW with moments in 8 bits, and what a checkpoint keeps of each."""

import importlib.util
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from gerl.config import ActorConfig
from gerl.errors import ConfigError
from gerl.model.shards import local

# what an optimizer keeps of a parameter once it has been updated: always, and of large ones
ADAMW = ("step", "exp_avg", "exp_avg_sq")
ADAMW8BIT = ("step", "state1", "state2")
QUANTISED = ("qmap1", "qmap2", "absmax1", "absmax2")  # of parameters of at least 4096 elements
PACKAGE = "bitsandbytes"


def check_optimizer(config: ActorConfig, device: str) -> None:
    """Raise `ConfigError` if there is no `config.optimizer` on `device`: two steps of it are tried."""
    if config.optimizer == "adamw":
        return
    given = f"actor.optimizer={config.optimizer}"
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"{given} needs the package {PACKAGE}: pip install 'gerl[{PACKAGE}]', or use actor.optimizer=adamw"
        )
    parameters = [torch.nn.Parameter(torch.ones(size, device=device)) for size in (8, 8192)]
    optimizer = build_optimizer(config, parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError, AttributeError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{given}: that of the {PACKAGE} installed here does not work on {device} ({reason}); use "
            "actor.optimizer=adamw"
        ) from None
    if not all(bool((p < 1).all()) for p in parameters):
        raise ConfigError(f"{given}: that of the {PACKAGE} installed here has no effect on {device}; use adamw")


def build_optimizer(config: ActorConfig, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW of `config`; for `adamw8bit` that of bitsandbytes (Dettmers et al. 2021, blockwise 8-bit moments)."""
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    if config.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit  # an optional package

        kind = AdamW8bit
    return kind(
        parameters,  # type: ignore[call-arg]
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def gradient_of(p: torch.nn.Parameter) -> torch.Tensor:
    """Its gradient, zeros where there is none."""
    return p.grad if p.grad is not None else torch.zeros_like(p)


def clip_gradients(
    parameters: Sequence[torch.nn.Parameter], limit: float, group: dist.ProcessGroup | None = None
) -> float:
    """Clip the norm of the gradients of `parameters` to `limit`; returns it as it was.

    `group`: the processes of which each has a part of every parameter; it is then a collective call, and says the same
    on all of them.
    """
    if group is None:
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))
    here = [local(p.grad) for p in parameters if p.grad is not None]
    here = [gradient for gradient in here if gradient.numel()]
    device = local(parameters[0]).device
    square = torch.zeros((), dtype=torch.float64, device=device)
    if here:
        square += torch.nn.utils.get_total_norm(here).double().square()
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    if here:
        torch._foreach_mul_(here, (limit / (norm + 1e-6)).clamp(max=1.0).float())  # as clip_grad_norm_ does
    return float(norm)


def state_of(optimizer: torch.optim.Optimizer, lora: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """The tensors that `optimizer` keeps, as `KEY/NAME` by the names of `lora`; none before the first update."""
    return {
        f"{key}/{name}": value if torch.is_tensor(value) else torch.tensor(float(value))
        for name, p in lora.items()
        for key, value in optimizer.state.get(p, {}).items()
    }


def expected_state(
    config: ActorConfig, lora: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors of the shapes and types that `state_of` gives, as far as `found` has any of a parameter."""
    expected: dict[str, torch.Tensor] = {}
    for name, p in lora.items():
        moments = {key: torch.zeros((), dtype=torch.float32) if key == "step" else p for key in _keys(config)}
        if config.optimizer == "adamw8bit" and any(f"{key}/{name}" in found for key in QUANTISED):
            blocks = found.get(f"absmax1/{name}", torch.zeros(0)).shape  # as many as the package makes of it
            moments |= {key: p.to(torch.uint8) for key in ("state1", "state2")}
            moments |= {key: torch.zeros(256) for key in ("qmap1", "qmap2")}
            moments |= {key: torch.zeros(blocks) for key in ("absmax1", "absmax2")}
        if any(f"{key}/{name}" in found for key in moments):  # none before the first update
            expected |= {f"{key}/{name}": like for key, like in moments.items()}
    return expected


def restore(
    optimizer: torch.optim.Optimizer, lora: Mapping[str, torch.nn.Parameter], found: Mapping[str, torch.Tensor]
) -> None:
    """Give `optimizer` what `state_of` returned, checked by `expected_state`."""
    counts = not isinstance(optimizer, torch.optim.AdamW)  # where the number of updates is a number, not a tensor
    for name, p in lora.items():
        own = {key: found[f"{key}/{name}"] for key in (*ADAMW, *ADAMW8BIT, *QUANTISED) if f"{key}/{name}" in found}
        if not own:
            continue
        state = {key: value.to(p.device, copy=True) for key, value in own.items() if key != "step"}
        step = own["step"].to("cpu", copy=True)  # AdamW keeps its step counter on the CPU
        optimizer.state[p] = {"step": int(step) if counts else step, **state}


def _keys(config: ActorConfig) -> tuple[str, ...]:
    return ADAMW8BIT if config.optimizer == "adamw8bit" else ADAMW
