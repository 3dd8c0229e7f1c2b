"""Objectives: are exit distributions distributions, is everything finite, do the objectives agree where they must?"""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from loopscope.objectives import (
    Objective,
    depth_kl,
    expected_loss,
    geometric_prior,
    log_exit_distribution,
    uniform_prior,
)

loops = st.integers(1, 9)
logits = st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=8)
lambdas = st.floats(0.01, 0.99)


@given(logits)
def test_q_is_a_distribution_for_any_logits(values: list[float]) -> None:
    q = log_exit_distribution(torch.tensor(values)[:, None]).exp()
    assert (q >= 0).all()
    assert q.sum() == pytest.approx(1, abs=1e-5)


@given(loops, lambdas)
def test_priors_are_distributions(count: int, lam: float) -> None:
    for prior in (uniform_prior(count), geometric_prior(lam, count)):
        assert len(prior) == count
        assert (prior > 0).all()
        assert prior.sum() == pytest.approx(1, abs=1e-12)


def test_the_prior_of_the_paper() -> None:
    assert geometric_prior(0.3, 4).tolist() == pytest.approx([0.3, 0.21, 0.147, 0.343])


def test_q_by_hand() -> None:
    """sigmoid(0) = 1/2, sigmoid(log 3) = 3/4; the last loop takes what is left, whatever its own logit."""
    gates = torch.tensor([[0.0], [math.log(3)], [5.0]], dtype=torch.float64)
    assert log_exit_distribution(gates).exp()[:, 0].tolist() == pytest.approx([1 / 2, 3 / 8, 1 / 8])


def test_kl_is_of_q_against_the_prior() -> None:
    """KL((1/2, 1/2) || (1/4, 3/4)) by hand; the other way round it would be another number."""
    q, prior = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    forward = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    backward = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    assert abs(forward - backward) > 0.01
    assert depth_kl(q.log()[:, None], prior.log()[:, None]).item() == pytest.approx(forward)


@settings(max_examples=60)
@given(logits, st.sampled_from(["uniform", "geometric"]))
def test_extreme_logits_stay_finite_in_value_and_gradient(values: list[float], prior: str) -> None:
    gates = torch.tensor(values)[:, None].requires_grad_()
    losses = torch.linspace(2, 0.1, len(values))[:, None].requires_grad_()
    objective = Objective(name="learned_gate", prior=prior, beta=0.1)  # type: ignore[arg-type]
    loss = objective.loss(losses, gates)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(gates.grad).all()
    assert torch.isfinite(losses.grad).all()


@given(loops.filter(lambda count: count > 1), lambdas)
def test_fixed_prior_is_the_learned_gate_with_q_at_the_prior_and_beta_0(count: int, lam: float) -> None:
    """The gate whose halt probability is pi_t / (mass left) has q = pi; then both losses are one, and the KL is 0."""
    prior = geometric_prior(lam, count)
    left = 1 - torch.cat((torch.zeros(1), prior.cumsum(0)[:-1]))
    gates = torch.logit((prior / left).clamp(1e-12, 1 - 1e-12))[:, None].expand(-1, 3)
    losses = torch.rand(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    fixed = Objective(name="fixed_prior", geometric_lambda=lam).loss(losses, None)
    learned = Objective(name="learned_gate", geometric_lambda=lam, beta=0.0).loss(losses, gates)
    assert learned.item() == pytest.approx(fixed.item(), rel=1e-4)
    log_q = log_exit_distribution(gates)
    assert depth_kl(log_q, prior.log()[:, None]).abs().max() < 1e-5


def test_beta_weighs_the_kl() -> None:
    gates, losses = torch.tensor([[2.0], [0.0], [0.0]]), torch.tensor([[3.0], [2.0], [1.0]])
    log_q = log_exit_distribution(gates)
    kl = depth_kl(log_q, uniform_prior(3).float().log()[:, None])
    for beta in (0.0, 0.5):
        loss = Objective(name="learned_gate", prior="uniform", beta=beta).loss(losses, gates)
        assert loss.item() == pytest.approx((expected_loss(losses, log_q.exp()) + beta * kl).item())


def test_a_prior_that_underflows_in_float32_stays_finite() -> None:
    gates, losses = torch.zeros(24, 2), torch.ones(24, 2)
    assert torch.isfinite(Objective(name="learned_gate", geometric_lambda=0.99).loss(losses, gates))


def test_halt_logits_in_half_precision_are_widened() -> None:
    gates = torch.tensor([[9.0], [0.0], [0.0]])
    losses = torch.tensor([[3.0], [2.0], [1.0]])
    objective = Objective(name="learned_gate", prior="uniform")
    assert objective.loss(losses, gates.bfloat16()).item() == pytest.approx(objective.loss(losses, gates).item())


def test_final_is_the_last_loop() -> None:
    losses = torch.tensor([[3.0, 1.0], [2.0, 5.0]])
    assert Objective(name="final").loss(losses, None).item() == pytest.approx(3.5)
