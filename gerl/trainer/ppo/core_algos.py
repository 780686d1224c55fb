"""The mathematics of the update: advantages, clipped policy loss, KL. Pure functions that never write an input."""

from typing import Literal

import torch

StdKind = Literal["group", "batch", "none"]


def group_advantages(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    std: StdKind = "group",
    leave_one_out: bool = False,
    eps: float = 1e-4,
) -> torch.Tensor:
    """`(reward - mean of its group) / (std + eps)` for `rewards` `[B]` and integer `group_ids` `[B]` -> `[B]`.

    `std`: population standard deviation of the group (Flow-GRPO), of all rewards (`batch`), or no division (Dr. GRPO,
    arXiv 2503.20783). `leave_one_out`: the baseline is the mean of the *other* members (RLOO, arXiv 2402.14740).
    A group whose rewards are all equal gets exactly 0. Raises `ValueError` on shapes that differ, non-finite rewards,
    and groups of one where a leave-one-out baseline does not exist.
    """
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards and group_ids must be [B], got {list(rewards.shape)} and {list(group_ids.shape)}")
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite: drop failed groups before computing advantages")
    values = rewards.double()  # fp32 sums of a group of equal rewards need not cancel
    _, members, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    sizes = sizes.to(values.dtype)
    zeros = torch.zeros_like(sizes)
    mean = zeros.index_add(0, members, values) / sizes
    centred = values - mean[members]
    variance = zeros.index_add(0, members, centred**2) / sizes
    highest = zeros.scatter_reduce(0, members, values, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, members, values, "amin", include_self=False)
    if leave_one_out:
        if (sizes < 2).any():
            raise ValueError("leave_one_out needs at least two samples in every group")
        centred = centred * (sizes / (sizes - 1))[members]
    match std:
        case "group":
            scale = variance.sqrt()[members] + eps
        case "batch":
            scale = values.std(correction=0) + eps
        case "none":
            scale = torch.ones(())
        case _:
            raise ValueError(f"std must be group, batch or none, got {std!r}")
    result = torch.where((highest > lowest)[members], centred / scale, 0.0)
    return result.to(rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())


def zero_std_fraction(rewards: torch.Tensor, group_ids: torch.Tensor) -> float:
    """Share of groups whose rewards are all equal (they carry no signal): in [0, 1], 0.0 for an empty batch."""
    groups = group_ids.unique()
    flat = sum(int((rewards[group_ids == g] == rewards[group_ids == g][0]).all()) for g in groups)
    return flat / len(groups) if len(groups) else 0.0


def clipped_policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, float]]:
    """PPO's surrogate (arXiv 1707.06347), mean over `[B]`: `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`.

    Returns the loss (scalar with gradient) and metrics: `ratio_deviation` = max |r - 1|, `clip_fraction_low` and
    `clip_fraction_high` = share of samples whose gradient the lower and the upper bound removes, `log_ratio_mean`.
    """
    log_ratio = log_prob - old_log_prob.detach()
    # beyond e^20 every clip range has long cut in; without the bound an infinite ratio makes the masked gradient NaN
    ratio = log_ratio.clamp(-20, 20).exp()
    clipped_high = (advantages > 0) & (ratio > 1 + clip_high)
    clipped_low = (advantages < 0) & (ratio < 1 - clip_low)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    # `where` rather than `maximum`: at r = 1 both arguments tie, and maximum would be free to split the gradient
    loss = torch.where(clipped_high | clipped_low, -advantages * bounded, -advantages * ratio).mean()
    names = ("ratio_deviation", "clip_fraction_low", "clip_fraction_high", "log_ratio_mean")
    values = (
        (ratio.detach() - 1).abs().max(),
        clipped_low.float().mean(),
        clipped_high.float().mean(),
        log_ratio.detach().mean(),
    )
    return loss, dict(zip(names, torch.stack(values).tolist(), strict=True))  # one device synchronisation


def gaussian_kl(mean: torch.Tensor, ref_mean: torch.Tensor, std: float) -> torch.Tensor:
    """KL of two Gaussians with the same `std`: `(mean - ref_mean)^2 / (2 std^2)`, mean over non-batch dims -> `[B]`.

    `std` is that of the whole step, sqrt(|dt|) included: the true KL (Flow-GRPO's code scales it by |dt|).
    """
    return ((mean.float() - ref_mean.detach().float()) ** 2).flatten(1).mean(1) / (2 * std**2)
