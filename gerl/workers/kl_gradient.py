"""Norms of the gradients of the reward and of the KL to the reference; their ratio is the weight that balances them.

The gradient is linear in the weight of the KL: g(c) = g(0) + c g_kl.
"""

from __future__ import annotations  # annotations name classes that the driver does not import

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from gerl.workers.worker import Credit, PolicyWorker

if TYPE_CHECKING:
    from gerl.algorithms import KLWeight
    from gerl.workers.fleet import LocalFleet

ROUNDS = 2  # with the first weight the smaller gradient may be lost in the rounding error of the larger one


def balancing_weight(fleet: LocalFleet, credit: Credit, pairs: int, kl: KLWeight) -> float:
    """Return the weight of the KL at which its gradient on `credit` has the norm of the rest of the loss's.

    NaN if one of the two is 0 or not finite. Drops the gradients accumulated so far.
    """
    drop_gradients(fleet)
    fleet.accumulate(credit, pairs, replace(kl, coef=0.0))
    reward, weight = _norm(fleet), 1.0
    for _ in range(ROUNDS):
        if not 0 < weight * reward < math.inf:
            break
        fleet.accumulate(credit, pairs, replace(kl, coef=weight))
        norm = _norm(fleet)
        weight = weight * reward / norm if norm > 0 else math.nan
    drop_gradients(fleet)
    return weight if 0 < weight * reward < math.inf else math.nan


def drop_gradients(fleet: LocalFleet) -> None:
    """Drop all gradients on the trainers, and the count of the evaluations for them."""
    fleet.trainers.run(_drop_gradient)


def _drop_gradient(worker: PolicyWorker) -> None:
    worker.actor.subtracted.clear()
    worker.actor.optimizer.zero_grad(set_to_none=True)
    worker.evaluations.taken()


def _norm(fleet: LocalFleet) -> float:
    """Return the norm of the sum of all trainers' gradients, minus that of the first call since `drop_gradients`."""
    return fleet.trainers.run(_take_norm, fleet.sum_gradients())[0]


def _take_norm(worker: PolicyWorker, together: bool) -> float:
    """Return the norm of a worker's gradient minus the first one, which is kept; drop the gradient.

    `together`: of the sum over all workers, a collective call.
    """
    from gerl.model.policy import local  # imported lazily: the driver does not need diffusers
    from gerl.workers.actor import clip_gradients, gradient_of

    actor = worker.actor
    if together:
        worker.reduce_gradient()
    first = not actor.subtracted
    for n, p in enumerate(actor.parameters):
        p.grad = gradient_of(p)
        if first:  # in main memory, since the KL itself needs more of the device's
            actor.subtracted.append(local(p.grad).detach().to("cpu", copy=True))
        else:
            local(p.grad).sub_(actor.subtracted[n].to(local(p.grad).device))
    norm = clip_gradients(actor.parameters, math.inf, actor.group)
    actor.optimizer.zero_grad(set_to_none=True)
    return norm
