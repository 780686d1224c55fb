"""Mathematics of the update: advantages, credit, policy losses, KL. Pure functions that never modify inputs."""

from __future__ import annotations  # torch is imported lazily

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, get_args

from gerl.config.blocks import KLKind, NodeStdKind, StdKind, StepWeighting
from gerl.utils.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

Metric: TypeAlias = "float | torch.Tensor"  # a number, or a scalar on the device
Metrics: TypeAlias = "dict[str, Metric]"

# --- advantages


@dataclass(frozen=True)
class _Groups:
    """Group statistics of rewards, in fp64, since fp32 sums of equal rewards may not cancel."""

    values: torch.Tensor  # [B]
    members: torch.Tensor  # [B] group index of each sample
    sizes: torch.Tensor  # [G]
    mean: torch.Tensor  # [G]
    std: torch.Tensor  # [G] population standard deviation
    highest: torch.Tensor  # [G]
    lowest: torch.Tensor  # [G]

    @property
    def differ(self) -> torch.Tensor:
        """Whether the rewards in a sample's group differ: `[B]`."""
        return (self.highest > self.lowest)[self.members]


def _grouped(rewards: torch.Tensor, group_ids: torch.Tensor) -> _Groups:
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards and group_ids must be [B], got {list(rewards.shape)} and {list(group_ids.shape)}")
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite: drop failed groups before computing advantages")
    values = rewards.double()
    _, members, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    sizes = sizes.to(values.dtype)
    zeros = torch.zeros_like(sizes)
    mean = zeros.index_add(0, members, values) / sizes
    variance = zeros.index_add(0, members, (values - mean[members]) ** 2) / sizes
    highest = zeros.scatter_reduce(0, members, values, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, members, values, "amin", include_self=False)
    return _Groups(values, members, sizes, mean, variance.sqrt(), highest, lowest)


def _typed_as(rewards: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    return result.to(rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())


def group_advantages(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    std: StdKind = "group",
    leave_one_out: bool = False,
    eps: float = 1e-4,
) -> torch.Tensor:
    """Return `(reward - group mean) / (std + eps)`, `[B]`, for `rewards` `[B]` and integer `group_ids` `[B]`.

    `std`: population standard deviation of the group (Flow-GRPO), of all rewards (`batch`), or no division (Dr. GRPO,
    arXiv 2503.20783). `leave_one_out`: the baseline is the mean of the *other* members (RLOO, arXiv 2402.14740).
    A group with equal rewards gets exactly 0. Raises `ValueError` for different shapes, non-finite rewards, and, with
    `leave_one_out`, groups of one.
    """
    g = _grouped(rewards, group_ids)
    centred = g.values - g.mean[g.members]
    if leave_one_out:
        if (g.sizes < 2).any():
            raise ValueError("leave_one_out needs at least two samples in every group")
        centred = centred * (g.sizes / (g.sizes - 1))[g.members]
    match std:
        case "group":
            scale = g.std[g.members] + eps
        case "batch":
            scale = g.values.std(correction=0) + eps
        case "none":
            scale = torch.ones(())
        case _:
            raise ValueError(f"std must be group, batch or none, got {std!r}")
    return _typed_as(rewards, torch.where(g.differ, centred / scale, 0.0))


def largest_of_groups(advantages: torch.Tensor, group_ids: torch.Tensor, share: float) -> torch.Tensor:
    """Return `advantages` `[B]` with all but the largest absolute values of each group replaced by NaN.

    `share` in (0, 1] of each group is kept, at least one; the first one on ties. Images near the mean contribute little
    but cost the same (PODS, arXiv 2504.13818).
    """
    largest = torch.full_like(advantages, torch.nan)
    for number in group_ids.unique():
        members = (group_ids == number).nonzero().flatten()
        order = advantages[members].abs().argsort(descending=True, stable=True)
        chosen = members[order[: max(1, round(share * len(members)))]]
        largest[chosen] = advantages[chosen]
    return largest


def batch_advantages(rewards: torch.Tensor, eps: float = 1e-4) -> torch.Tensor:
    """Return `(reward - batch mean) / (population std of the batch + eps)`, `[B]` (REINFORCE++, arXiv 2501.03262).

    There are no groups, so a prompt needs only one sample. Equal rewards give exactly 0. Raises `ValueError` for
    non-finite rewards.
    """
    return group_advantages(rewards, torch.zeros_like(rewards, dtype=torch.long), eps=eps)


def decoupled_advantages(
    rewards: torch.Tensor, weights: torch.Tensor, group_ids: torch.Tensor, std: StdKind = "group", eps: float = 1e-4
) -> torch.Tensor:
    """Return advantages `[B]` of GDPO (arXiv 2601.05242) for `rewards` `[B, R]`, `weights` `[R]`, `group_ids` `[B]`.

    The rewards of each of the R scorers are normalised as in `group_advantages`, so that no scorer dominates by its
    spread. The weighted sum is divided by its population std over the batch plus `eps` (its mean is already 0). A group
    with equal rewards in every column gets exactly 0. Raises `ValueError` like `group_advantages`.
    """
    if rewards.ndim != 2 or weights.shape != rewards.shape[1:]:
        raise ValueError(f"rewards must be [B, R] and weights [R], got {list(rewards.shape)} and {list(weights.shape)}")
    columns = [group_advantages(column, group_ids, std, eps=eps) for column in rewards.double().unbind(1)]
    total = torch.stack(columns, 1) @ weights.to(columns[0])
    return _typed_as(rewards, torch.where(total == 0, 0.0, total / (total.std(correction=0) + eps)))


def group_ranks(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """Return the share of other samples in its group that a sample beats, ties counting half: `[B]` in [0, 1].

    Invariant to strictly increasing transformations of the rewards; 0.5 for a group of one. Raises `ValueError` like
    `group_advantages`.
    """
    g = _grouped(rewards, group_ids)
    same = g.members[:, None] == g.members
    beaten, equal = g.values[:, None] > g.values, g.values[:, None] == g.values
    wins = (same & beaten).sum(1) + ((same & equal).sum(1) - 1) / 2  # excluding the tie with itself
    return _typed_as(rewards, torch.where(same.sum(1) > 1, wins / (same.sum(1) - 1), 0.5))


def tree_advantages(
    rewards: torch.Tensor, nodes: torch.Tensor, group_ids: torch.Tensor, eps: float = 1e-8, std: NodeStdKind = "depth"
) -> torch.Tensor:
    """Return the advantage `[B, D]` of each leaf's ancestor at each depth of its tree (BranchGRPO, arXiv 2509.06040).

    `rewards`: `[B]` of the leaves; `nodes`: `[B, D]` integer ids of their ancestors, unique within a group and depth. A
    node's reward is the mean over its leaves; its advantage is `(reward - mean) / (std + eps)` over the nodes of its
    group and depth, each counted once regardless of its leaves, and 0 if std < 1e-6 or the node is alone (a root).
    `std`: of the nodes of the depth, or of the group's leaves (TreeGRPO, arXiv 2512.08153); with the latter, in a tree
    of equal branches, a node's advantage is the mean of its leaves' advantages. Raises `ValueError` for different
    shapes and non-finite rewards.
    """
    if nodes.ndim != 2 or nodes.shape[:1] != rewards.shape:
        raise ValueError(f"rewards must be [B] and nodes [B, D], got {list(rewards.shape)} and {list(nodes.shape)}")
    result = torch.zeros(nodes.shape, dtype=torch.double, device=rewards.device)
    for depth, ids in enumerate(nodes.unbind(1)):
        keys, node = torch.stack([group_ids, ids], 1).unique(dim=0, return_inverse=True)
        g = _grouped(_grouped(rewards, node).mean, keys[:, 0])
        spread = g.std if std == "depth" else _grouped(rewards, group_ids).std
        scaled = (g.values - g.mean[g.members]) / (spread[g.members] + eps)
        result[:, depth] = torch.where(g.std[g.members] < 1e-6, 0.0, scaled)[node]
    return _typed_as(rewards, result)


def generalised_advantages(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float = 1.0, lam: float = 1.0
) -> torch.Tensor:
    """Return the generalised advantage estimates of the actions of trajectories, `[B, T]` (GAE, arXiv 1506.02438).

    `rewards` `[B]` of the finished images; `values` `[B, T]` of the states before each step, NaN at steps that are no
    actions, as in the result. The error of an action is `d_k = gamma V(s') - V(s_k)` with the state s' of the next one,
    of the last one `reward - V(s_k)`; the advantage is the sum of `(gamma lam)^i` times the i-th error from k on
    (equation 16). `result + values` are the TD(lambda) targets of the values. Raises `ValueError` for different shapes
    and non-finite rewards.
    """
    if rewards.ndim != 1 or values.ndim != 2 or len(values) != len(rewards):
        raise ValueError(f"rewards must be [B] and values [B, T], got {list(rewards.shape)} and {list(values.shape)}")
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite: drop failed groups before computing advantages")
    advantages = torch.full_like(values, torch.nan, dtype=torch.double)
    outcome, later = rewards.double(), torch.zeros_like(rewards, dtype=torch.double)
    for k in reversed(range(values.shape[1])):
        value, acts = values[:, k].double(), ~values[:, k].isnan()
        advantage = outcome - value + later
        advantages[:, k] = advantage
        outcome = torch.where(acts, gamma * value, outcome)
        later = torch.where(acts, gamma * lam * advantage, later)
    return advantages.to(values.dtype)


def zero_std_fraction(rewards: torch.Tensor, group_ids: torch.Tensor) -> float:
    """Return the share of groups with equal rewards, which carry no signal: in [0, 1], 0.0 for an empty batch."""
    groups = group_ids.unique()
    flat = sum(int((rewards[group_ids == g] == rewards[group_ids == g][0]).all()) for g in groups)
    return flat / len(groups) if len(groups) else 0.0


# --- credit of likelihood-free algorithms


def preference_pairs(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """Return +1 for the best sample of each group, -1 for the worst, otherwise 0: `[B]`; the first one on ties.

    Pairs for online Diffusion-DPO (arXiv 2311.12908). A group with equal rewards has no pair and gets zeros. Raises
    `ValueError` for different shapes and non-finite rewards.
    """
    g = _grouped(rewards, group_ids)
    order = torch.arange(len(rewards), device=rewards.device)
    none = torch.full_like(g.sizes, len(rewards), dtype=torch.long)
    result = torch.zeros_like(g.values)
    for sign, extreme in ((1.0, g.highest), (-1.0, g.lowest)):
        candidates = torch.where(g.values == extreme[g.members], order, len(rewards))
        first = none.scatter_reduce(0, g.members, candidates, "amin")
        result = result + sign * (order == first[g.members])
    return _typed_as(rewards, result)  # with equal rewards the first is best and worst: +1 - 1


def best_of_group(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """Return 1 for samples with the highest reward of their group, otherwise 0: `[B]` (RAFT, arXiv 2304.06767).

    A group with equal rewards carries no signal and gets zeros. Raises `ValueError` for different shapes and non-finite
    rewards.
    """
    g = _grouped(rewards, group_ids)
    return _typed_as(rewards, (g.values == g.highest[g.members]) & g.differ)


def regression_weights(rewards: torch.Tensor, group_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return `group size * softmax over the group of (group advantage / temperature)`: `[B]`, with group mean 1.

    Reward-weighted regression (Peters & Schaal 2007; for diffusion models arXiv 2302.12192). A group with equal rewards
    carries no signal and gets 0 instead of 1. Raises `ValueError` like `preference_pairs`, and if `temperature` is not
    positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    g = _grouped(rewards, group_ids)
    scores = group_advantages(g.values, g.members) / temperature
    powers = (scores - _grouped(scores, g.members).highest[g.members]).exp()
    return _typed_as(rewards, torch.where(g.differ, powers / _grouped(powers, g.members).mean[g.members], 0.0))


# --- policy losses


def clipped_policy_loss(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, Metrics]:
    """Return PPO's surrogate (arXiv 1707.06347) of each row: `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`.

    Returns losses `[B]` with gradient, and metrics: `ratio_deviation`, max |r - 1|; `clip_fraction_low` and
    `clip_fraction_high`, shares of samples whose gradient is removed by the lower and upper bound; `log_ratio_mean`.
    """
    log_ratio = log_prob - old_log_prob.detach()
    ratio = _ratio(log_ratio)
    clipped_high = (advantages > 0) & (ratio > 1 + clip_high)
    clipped_low = (advantages < 0) & (ratio < 1 - clip_low)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    # `where` instead of `maximum`, which may split the gradient at r = 1, where both arguments are equal
    losses = torch.where(clipped_high | clipped_low, -advantages * bounded, -advantages * ratio)
    return losses, _ratio_metrics(log_ratio, ratio, clipped_low, clipped_high)


def masked_policy_loss(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, advantages: torch.Tensor, kl: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, Metrics]:
    """Return `-A r` of each row with a trust region by KL instead of ratio (Flow-DPPO, arXiv 2606.11025).

    A sample whose exact `kl` `[B]` to the old policy is at least `threshold` has no gradient if its ratio would move
    further away (`A > 0` and `r > 1`, or `A < 0` and `r < 1`). Returns losses and metrics like `clipped_policy_loss`;
    `clip_fraction_low` and `clip_fraction_high` are the shares masked below and above ratio 1.
    """
    log_ratio = log_prob - old_log_prob.detach()
    ratio = _ratio(log_ratio)
    beyond = kl.detach() >= threshold
    masked_high = beyond & (advantages > 0) & (ratio > 1)
    masked_low = beyond & (advantages < 0) & (ratio < 1)
    losses = -advantages * torch.where(masked_high | masked_low, ratio.detach(), ratio)
    return losses, _ratio_metrics(log_ratio, ratio, masked_low, masked_high)


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    # e^20 is beyond any clip range; an infinite ratio would make the masked gradient NaN
    return log_ratio.clamp(-20, 20).exp()


def _ratio_metrics(log_ratio: torch.Tensor, ratio: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> Metrics:
    names = ("ratio_deviation", "clip_fraction_low", "clip_fraction_high", "log_ratio_mean")
    values = ((ratio.detach() - 1).abs().max(), low.float().mean(), high.float().mean(), log_ratio.detach().mean())
    return dict(zip(names, values, strict=True))


SPREAD = ("log_ratio_abs", "outside_fraction")  # metrics that are informative only off policy


def ratio_spread(log_ratio: torch.Tensor, outside: torch.Tensor) -> Metrics:
    """Return the mean |log ratio| of `log_ratio` `[B]`, and the share of samples `outside` the trust region."""
    return dict(zip(SPREAD, (log_ratio.detach().abs().mean(), outside.float().mean()), strict=True))


def guard_log_ratio(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, mean: torch.Tensor, old_mean: torch.Tensor, std: float
) -> torch.Tensor:
    """Return GRPO-Guard's normalised log-ratio `(log_prob - old_log_prob + KL to the old policy) * std`, `[B]`.

    Source: arXiv 2510.22319. Equal to `mean(z (mean - old_mean))` with `z = (x' - old_mean) / std`. Unlike the plain
    log-ratio it has mean 0 and the same spread at every timestep, so that both clip bounds act. `std` is of the whole
    step, including sqrt(|dt|); `old_log_prob` and `old_mean` are detached. Pass the result as `log_prob` to the policy
    losses, with 0 as the old one.
    """
    return (log_prob - old_log_prob.detach() + gaussian_kl(mean, old_mean, std)) * std


# those that follow from noise levels; `discount` follows from the steps after a step
LEVEL_WEIGHTS: tuple[StepWeighting, ...] = tuple(kind for kind in get_args(StepWeighting) if kind != "discount")
RELATIVE_WEIGHTS: tuple[StepWeighting, ...] = ("std", "pcpo", "std2_over_jacobian")  # with mean 1 over the steps


def step_weights(
    kind: StepWeighting, stds: Sequence[float], dts: Sequence[float], jacobians: Sequence[float]
) -> list[float]:
    """Return the weight of each timestep's loss, given its transition's std, `dt` and `J = d mean / d model output`.

    `kind`: one of `LEVEL_WEIGHTS`.

    The gradient of a log-probability with respect to the model output is `J / std` times the sampled noise. With weight
    w a step counts as `w J / std`:

    - `uniform`: 1, so that steps with little noise count most.
    - `std`: std over its mean (TempFlow-GRPO, arXiv 2508.04324).
    - `inverse_dt`: `1 / |dt|` (GRPO-Guard, arXiv 2510.22319).
    - `inverse_jacobian`: `1 / |J|` (Precise, arXiv 2605.23522).
    - `pcpo`: `std |dt| / |J|` over its mean: proportional to the interval (PCPO, arXiv 2509.25774).
    - `std2_over_jacobian`: `std^2 / |J|` over its mean: proportional to the noise, like the gradient of regressing the
      model output to the output that leads to the sampled latents.

    Raises `ValueError` if a denominator is 0.
    """
    if kind not in LEVEL_WEIGHTS:
        raise ValueError(f"kind must be one of {', '.join(LEVEL_WEIGHTS)}, got {kind!r}")
    weights = []
    for k, (std, dt, jacobian) in enumerate(zip(stds, dts, jacobians, strict=True)):
        above, below = {
            "uniform": (1.0, 1.0),
            "std": (std, 1.0),
            "inverse_dt": (1.0, abs(dt)),
            "inverse_jacobian": (1.0, abs(jacobian)),
            "pcpo": (std * abs(dt), abs(jacobian)),
            "std2_over_jacobian": (std * std, abs(jacobian)),
        }[kind]
        if below == 0:
            raise ValueError(f"{kind} weights are undefined: trained timestep {k} divides by 0")
        weights.append(above / below)
    mean = sum(weights) / max(len(weights), 1) if kind in RELATIVE_WEIGHTS else 1.0
    return [weight / mean for weight in weights]


def decay_at(schedule: Sequence[float], update: int) -> float:
    """Return the decay of an averaged old policy at its `update`-th update; `schedule`: (hold, start, slope, limit).

    `start` up to and including update `hold`, then `min(start + slope * (update - hold), limit)`, as in
    DiffusionNFT (arXiv 2509.16117) and CRD (arXiv 2603.14128).
    """
    hold, start, slope, limit = schedule
    return start if update <= hold else min(start + slope * (update - hold), limit)


# --- KL


def gaussian_kl(mean: torch.Tensor, ref_mean: torch.Tensor, std: float) -> torch.Tensor:
    """Return the KL of Gaussians with equal `std`: `(mean - ref_mean)^2 / (2 std^2)`, mean over non-batch dims, `[B]`.

    `std` is of the whole step, including sqrt(|dt|): the true KL (Flow-GRPO's code scales it by |dt|).
    """
    return ((mean.float() - ref_mean.detach().float()) ** 2).flatten(1).mean(1) / (2 * std**2)


def kl_divergence(
    kind: KLKind,
    *,
    mean: torch.Tensor | None = None,
    ref_mean: torch.Tensor | None = None,
    std: float | None = None,
    dt: float | None = None,
    output: torch.Tensor | None = None,
    ref_output: torch.Tensor | None = None,
    log_prob: torch.Tensor | None = None,
    ref_log_prob: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the distance of one timestep's policy to the reference policy: `[B]`, with gradient only to the former.

    - `gaussian` (`mean`, `ref_mean`, `std`): `gaussian_kl`, the true KL as a mean over the D non-batch dims.
    - `flow_grpo` (also `dt`): |dt| times `gaussian`, as in Flow-GRPO's code (arXiv 2505.05470).
    - `velocity` (`output`, `ref_output`): mean squared difference of the model outputs.
    - `k1`, `k2`, `k3` (`log_prob`, `ref_log_prob` of the sampled x'): Schulman's estimators (2020) `d`, `d^2 / 2` and
      `exp(-d) - 1 + d` of `d = log_prob - ref_log_prob`. As log-probs are means over dims, the mean of `k1` is
      `gaussian`, but `k2` and `k3` are about 1/D of it. On policy the gradient of `k1` vanishes on average.

    Raises `ValueError` if the kind is unknown or one of its arguments is missing.
    """
    match kind:
        case "gaussian" if mean is not None and ref_mean is not None and std is not None:
            return gaussian_kl(mean, ref_mean, std)
        case "flow_grpo" if mean is not None and ref_mean is not None and std is not None and dt is not None:
            return abs(dt) * gaussian_kl(mean, ref_mean, std)
        case "velocity" if output is not None and ref_output is not None:
            return ((output.float() - ref_output.detach().float()) ** 2).flatten(1).mean(1)
        case "k1" | "k2" | "k3" if log_prob is not None and ref_log_prob is not None:
            d = log_prob - ref_log_prob.detach()
            # expm1, since exp(-d) - 1 loses precision for small d
            return d if kind == "k1" else d**2 / 2 if kind == "k2" else (-d).clamp(-20, 20).expm1() + d
        case _ if kind in get_args(KLKind):
            raise ValueError(f"a KL of kind {kind} is missing one of its arguments")
        case _:
            raise ValueError(f"kind must be one of {', '.join(get_args(KLKind))}, got {kind!r}")


# --- Advantages shaped by diversity (dissimilarity within a group), against collapse to a single image


def scaled_by_diversity(advantages: torch.Tensor, diversity: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """Return `A d / group mean of d` if A > 0, otherwise A; all `[B]` (GARDO, arXiv 2512.24138).

    `diversity` d: dissimilarity of an image to its group, at least 0. A group of equal images (mean 0) keeps its
    advantages. As in the authors' code (tinnerhrhe/GARDO 1cc77fb, flow_grpo/stat_tracking.py, lines 114-135), where d
    is the minimum cosine distance of DINOv3 features, and a mean of 0 gives NaN.
    """
    result = advantages.clone()
    for number in group_ids.unique():
        members = group_ids == number
        d = diversity[members].double().clamp_min(0)
        if (mean := d.mean()) > 0:
            of_group = advantages[members]
            result[members] = torch.where(of_group > 0, of_group * (d / mean).to(of_group), of_group)
    return result


def shaped_by_diversity(
    advantages: torch.Tensor, diversity: torch.Tensor, group_ids: torch.Tensor, coefficient: float
) -> torch.Tensor:
    """Return `A + coefficient * group_advantages(d)`, `[B]`: reward shaping with image diversity as the potential.

    Over a trajectory, the differences of a potential (Ng et al. 1999) add up to its value at the end minus the value at
    the initial noise, which the policy does not choose, so all steps get the potential of the image. Diversity within a
    group as a shaping potential is DRIFT's idea (arXiv 2601.12401); only its abstract was accessible to this project,
    not its formula.
    """
    return advantages + coefficient * group_advantages(diversity, group_ids).to(advantages)
