"""Rewards that pay for the KL to the base model."""

import pytest
from crediting import Crediting, config, scored


def test_rewards_pay_for_the_kl() -> None:
    crediting = Crediting(config(kl_coef=0.5, kl_in_reward=True))
    step = crediting.step(scored(crediting.config, [1.0, 3.0, 5.0, 5.0]), kl=[0.0, 4.0, 2.0, 0.0])
    assert step.credit is not None and step.credit[:, 0].tolist() == pytest.approx([0.0, 0.0, -0.5, 0.5])
    assert step.metrics["reward/mean"] == 3.5 and step.metrics["reward/kl"] == 1.5


def test_only_the_images_that_watched_scorers_doubt_pay_for_the_kl() -> None:
    crediting = Crediting(config(kl_coef=0.5, kl_share=0.5, kl_in_reward=True))  # the watched one says the same of all
    step = crediting.step(scored(crediting.config, [1.0, 3.0, 5.0, 5.0]), kl=[0.0, 4.0, 2.0, 0.0])
    assert step.kl_weight is not None
    assert step.kl_weight.tolist() == [0.0, 0.0, 0.0, 0.0]  # of two with the same doubt none is beyond
    step = crediting.step(scored(crediting.config, [1.0, 3.0, 5.0, 6.0]), kl=[0.0, 4.0, 2.0, 4.0])
    assert step.kl_weight is not None and step.kl_weight.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert step.metrics["group/kl_share"] == 0.25
    assert step.credit is not None
    assert step.credit[:, 0].tolist() == pytest.approx([-1.0, 1.0, 0.5, -0.5])  # 6 - 0.5 * 4 = 4


def test_a_failed_group_pays_nothing_and_the_others_their_own() -> None:
    crediting = Crediting(config(kl_coef=0.5, kl_in_reward=True))
    step = crediting.step(scored(crediting.config, [None, 3.0, 5.0, 5.0]), kl=[9.0, 9.0, 2.0, 0.0])
    assert step.credit is not None and step.credit[:2].isnan().all()
    assert step.credit[2:, 0].tolist() == pytest.approx([-0.5, 0.5])
