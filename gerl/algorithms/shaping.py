"""Advantages shaped by how unlike the other images of its group an image is, against the collapse to one picture."""

import torch

from gerl.algorithms.core_algos import group_advantages


def scaled_by_diversity(advantages: torch.Tensor, diversity: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """GARDO (arXiv 2512.24138): `A d / mean of d over the group` where A > 0, else A; all `[B]`.

    `diversity` d: how unlike the others of its group an image is, at least 0. A group whose images are all alike (mean
    0) keeps its advantages. As the authors' code has it (tinnerhrhe/GARDO 1cc77fb, flow_grpo/stat_tracking.py, lines
    114-135), where d is the least cosine distance of DINOv3 features, and a mean of 0 gives NaN.
    """
    result = advantages.clone()
    for number in group_ids.unique():
        members = group_ids == number
        d = diversity[members].double().clamp_min(0)
        if (mean := d.mean()) > 0:
            own = advantages[members]
            result[members] = torch.where(own > 0, own * (d / mean).to(own), own)
    return result


def shaped_by_diversity(
    advantages: torch.Tensor, diversity: torch.Tensor, group_ids: torch.Tensor, coefficient: float
) -> torch.Tensor:
    """`A + coefficient * group_advantages(d)`, `[B]`: the diversity of the images as a potential that shapes rewards.

    Over a trajectory the differences of a potential (Ng et al. 1999) add up to that of its end less that of its
    beginning, which is noise and no choice of the policy: all steps get the potential of the image. That diversity
    within a group is to shape the reward as a potential is DRIFT's idea (arXiv 2601.12401); its own formula was not
    accessible to this project, only the abstract.
    """
    return advantages + coefficient * group_advantages(diversity, group_ids).to(advantages)
