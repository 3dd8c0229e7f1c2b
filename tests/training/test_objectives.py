"""Objectives: are exit distributions distributions, is everything finite, do the objectives agree where they must?"""

import math
from collections import Counter

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
from conftest import tiny_settings
from hypothesis import given, settings
from torch import Tensor

import loopscope as ls
from loopscope.readouts.signals import HALTED
from loopscope.training.objectives import (
    LoopLosses,
    LossFunction,
    Unrolling,
    act_weights,
    depth_kl,
    depth_prior,
    draw_unrolling,
    expected_loops,
    expected_loss,
    geometric_prior,
    load_objective,
    log_exit_distribution,
    objective_loss,
    uniform_prior,
)
from loopscope.training.settings import Objective
from loopscope.training.task_run import AnswerLosses, initial_model, training_batches

CPU = torch.device("cpu")
loops = st.integers(1, 9)
logits = st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=8)
lambdas = st.floats(0.01, 0.99)


@settings(max_examples=100)
@given(logits, st.sampled_from(["uniform", "geometric"]))
def test_any_logits_give_a_distribution_and_finite_losses_and_gradients(values: list[float], prior: str) -> None:
    q = log_exit_distribution(torch.tensor(values)[:, None]).exp()
    assert (q >= 0).all()
    assert q.sum() == pytest.approx(1, abs=1e-5)
    gates = torch.tensor(values)[:, None].requires_grad_()
    losses = torch.linspace(2, 0.1, len(values))[:, None].requires_grad_()
    loss = objective_loss(Objective(name="learned_gate", prior=prior, beta=0.1), losses, gates)  # type: ignore[arg-type]
    loss.backward()
    assert all(torch.isfinite(value).all() for value in (loss, gates.grad, losses.grad))


@given(loops, lambdas)
def test_priors_are_distributions(count: int, lam: float) -> None:
    for prior in (uniform_prior(count), geometric_prior(lam, count)):
        assert len(prior) == count
        assert (prior > 0).all()
        assert prior.sum() == pytest.approx(1, abs=1e-12)


def test_prior_and_exit_distribution_by_hand() -> None:
    """sigmoid(0) = 1/2, sigmoid(log 3) = 3/4; the last loop takes what is left, whatever its own logit."""
    assert geometric_prior(0.3, 4).tolist() == pytest.approx([0.3, 0.21, 0.147, 0.343])
    gates = torch.tensor([[0.0], [math.log(3)], [5.0]], dtype=torch.float64)
    assert log_exit_distribution(gates).exp()[:, 0].tolist() == pytest.approx([1 / 2, 3 / 8, 1 / 8])


def test_kl_is_of_q_against_the_prior() -> None:
    """KL((1/2, 1/2) || (1/4, 3/4)) by hand; the other way round it would be another number."""
    q, prior = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    forward = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    backward = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    assert abs(forward - backward) > 0.01
    assert depth_kl(q.log()[:, None], prior.log()[:, None]).item() == pytest.approx(forward)


@given(loops.filter(lambda count: count > 1), lambdas)
def test_fixed_prior_is_the_learned_gate_with_q_at_the_prior_and_beta_0(count: int, lam: float) -> None:
    """The gate whose halt probability is pi_t / (mass left) has q = pi; then both losses are one, and the KL is 0."""
    prior = geometric_prior(lam, count)
    left = 1 - torch.cat((torch.zeros(1), prior.cumsum(0)[:-1]))
    gates = torch.logit((prior / left).clamp(1e-12, 1 - 1e-12))[:, None].expand(-1, 3)
    losses = torch.rand(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    fixed = objective_loss(Objective(name="fixed_prior", geometric_lambda=lam), losses, None)
    learned = objective_loss(Objective(name="learned_gate", geometric_lambda=lam, beta=0.0), losses, gates)
    assert learned.item() == pytest.approx(fixed.item(), rel=1e-4)
    assert depth_kl(log_exit_distribution(gates), prior.log()[:, None]).abs().max() < 1e-5


def test_beta_weighs_the_kl_and_halt_logits_are_widened() -> None:
    gates, losses = torch.tensor([[9.0], [0.0], [0.0]]), torch.tensor([[3.0], [2.0], [1.0]])
    log_q = log_exit_distribution(gates)
    kl = depth_kl(log_q, uniform_prior(3).float().log()[:, None])
    for beta in (0.0, 0.5):
        objective = Objective(name="learned_gate", prior="uniform", beta=beta)
        loss = objective_loss(objective, losses, gates).item()
        assert loss == pytest.approx((expected_loss(losses, log_q.exp()) + beta * kl).item())
        assert objective_loss(objective, losses, gates.bfloat16()).item() == pytest.approx(loss)


def test_objectives_by_hand() -> None:
    """The last loop alone; and a prior that underflows in float32 stays finite."""
    losses = torch.tensor([[3.0, 1.0], [2.0, 5.0]])
    for name in ("final", "random_depth"):
        assert objective_loss(Objective(name=name), losses, None).item() == pytest.approx(3.5)
    objective = Objective(name="learned_gate", geometric_lambda=0.99)
    assert torch.isfinite(objective_loss(objective, torch.ones(24, 2), torch.zeros(24, 2)))


def decoupled_gradients(objective: Objective | LossFunction, detached: bool = False) -> dict[str, Tensor]:
    """Of the first batch, on the first model of a run with a decoupled gate."""
    run = tiny_settings("objective.name=decoupled_gate", "model.gate=mlp")
    model = initial_model(run)
    losses, _, gate_logits, apart = AnswerLosses(model)(training_batches(run)(0), CPU)
    if detached:
        losses, gate_logits = losses.detach(), apart
    minimised = load_objective(objective, 0) if isinstance(objective, Objective) else objective
    minimised(LoopLosses(losses, gate_logits, 0, apart)).backward()  # type: ignore[no-untyped-call]
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("prior", ["uniform", "geometric"])
def test_the_trunk_has_the_fixed_prior_s_gradients_and_a_decoupled_gate_the_joint_one_s(prior: str) -> None:
    gradients, trunk, gate = (
        decoupled_gradients(Objective(name=name, prior=prior, beta=0.3), detached=name == "learned_gate")  # type: ignore[arg-type]
        for name in ("decoupled_gate", "fixed_prior", "learned_gate")
    )
    assert all(name.startswith("gate.") for name in gate)
    assert set(gradients) == set(trunk) | set(gate)
    for name, value in {**trunk, **gate}.items():
        assert value.abs().max() > 0
        assert torch.equal(gradients[name], value), name


def of_channels(weight: float, gradient: float) -> dict[str, Tensor]:
    return decoupled_gradients(Objective(name="gate_channels", gate_weight=weight, gate_gradient=gradient, beta=0.3))


@settings(max_examples=100)
@given(logits)
def test_the_weights_of_act_are_a_distribution_and_its_cost_is_n_and_the_remainder(values: list[float]) -> None:
    gates = torch.tensor(values)[:, None].expand(-1, 3).clone().requires_grad_()
    weights, cost = act_weights(gates)
    assert (weights >= 0).all()
    assert weights.sum(0).tolist() == pytest.approx([1] * 3, abs=1e-6)
    halts, spent = torch.sigmoid(gates[:, 0]).tolist(), 0.0
    for loop, halt in enumerate(halts, start=1):
        if float(np.float32(1) - np.float32(1 - spent) + np.float32(halt)) >= HALTED or loop == len(halts):
            break
        spent += halt
    assert cost.tolist() == pytest.approx([loop + 1 - spent] * 3, abs=1e-5)
    assert (weights[loop:] == 0).all()
    losses = torch.linspace(2, 0.1, len(values))[:, None].expand(-1, 3)
    objective_loss(Objective(name="act"), losses, gates).backward()  # type: ignore[no-untyped-call]
    assert gates.grad is not None
    assert torch.isfinite(gates.grad).all()


def test_act_by_hand() -> None:
    """sigmoid(0) = 1/2, sigmoid(-log 3) = 1/4, sigmoid(log 999) = 0.999."""
    half, quarter, all_of_it = 0.0, -math.log(3), math.log(999)
    gates = torch.tensor([[quarter, all_of_it, quarter], [half, half, quarter], [half, half, quarter]]).requires_grad_()
    weights, cost = act_weights(gates)
    expected = [[0.25, 1, 0.25], [0.5, 0, 0.25], [0.25, 0, 0.5]]  # the last loop weighs what is left
    assert weights.tolist() == [pytest.approx(row) for row in expected]
    assert cost.tolist() == pytest.approx([3.25, 2, 3.5])
    losses = torch.tensor([[3.0, 3.0, 3.0], [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    loss = objective_loss(Objective(name="act", beta=0.1), losses, gates)
    assert loss.item() == pytest.approx((2.0 + 0.325 + 3 + 0.2 + 1.75 + 0.35) / 3)
    loss.backward()  # type: ignore[no-untyped-call]
    slopes = [0.25 * 0.75 * (2 - 0.1) / 3, 0.5 * 0.5 * (1 - 0.1) / 3]  # (l_t - l_N - beta) h (1 - h), of three rows
    assert gates.grad is not None
    assert gates.grad[:, 0].tolist() == pytest.approx([*slopes, 0])
    assert gates.grad[:, 1].tolist() == [0, 0, 0]  # it halts at once, and N has no gradient


@pytest.mark.parametrize("name", ["fixed_prior", "learned_gate", "decoupled_gate", "gate_channels", "random_depth"])
def test_weights_of_a_prior_are_those_of_the_prior_that_has_them(name: str) -> None:
    geometric = Objective(name=name, geometric_lambda=0.3, **({"gate_weight": 0.5} if name == "gate_channels" else {}))  # type: ignore[arg-type]
    listed = msgspec.structs.replace(geometric, prior=tuple(geometric_prior(0.3, 3).tolist()))
    losses, gates = torch.rand(3, 5), torch.rand(3, 5)
    found, expected = (objective_loss(each, losses, gates, gates) for each in (listed, geometric))
    assert torch.equal(found, expected)
    drawn = [[draw_unrolling(each, 3, 1, step) for step in range(20)] for each in (listed, geometric)]
    assert drawn[0] == drawn[1]
    assert expected_loops(listed, 3) == expected_loops(geometric, 3)
    assert name == "random_depth" or found.item() > 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), loops)
def test_only_distributions_over_all_loops_are_priors(weights: list[float], count: int) -> None:
    total = math.fsum(weights)
    listed = tuple(weight / total for weight in weights) if total > 0.1 else (1.0,)
    objective = Objective(prior=listed)
    if len(listed) == count:
        assert depth_prior(objective, count).tolist() == list(listed)
    else:
        with pytest.raises(ls.UserError, match=f"it must give {count} weights, one for each loop, that are not neg"):
            depth_prior(objective, count)


@settings(max_examples=8)
@given(st.floats(0, 1), st.floats(0, 1))
def test_each_channel_has_its_share_of_the_trunk_s_gradient_and_none_of_the_gate_s(
    weight: float, gradient: float
) -> None:
    """From the decoupled gate to joint training, whose two channels add up; the gate learns the same everywhere."""
    found, apart, joint = of_channels(weight, gradient), of_channels(0, 0), of_channels(1, 1)
    weighed, reached = of_channels(1, 0), of_channels(0, 1)
    for name, value in found.items():
        if name.startswith("gate."):
            assert torch.allclose(value, joint[name], rtol=1e-4, atol=1e-7), name
            continue
        by_weight, by_gradient = weighed[name] - apart[name], reached[name] - apart[name]
        assert min(by_weight.abs().max(), by_gradient.abs().max()) > 1e-6
        assert torch.allclose(value, apart[name] + weight * by_weight + gradient * by_gradient, rtol=1e-4, atol=1e-6)
        assert torch.allclose(joint[name], apart[name] + by_weight + by_gradient, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("gradient", [0, 1])
def test_one_channel_alone_to_the_bit(gradient: int) -> None:
    """Written with the objectives that there were before: the fixed prior with a gate, and weights that are held."""

    def by_hand(loops: LoopLosses) -> Tensor:
        losses, read = loops.cross_entropy, loops.gate_logits if gradient else loops.detached_gate_logits
        assert loops.gate_logits is not None
        trunk = objective_loss(Objective(), losses, None)
        if not gradient:
            trunk = objective_loss(Objective(name="learned_gate", beta=0), losses, loops.gate_logits.detach())
        return trunk + objective_loss(Objective(name="learned_gate", beta=0.3), losses.detach(), read)

    found, expected = of_channels(1 - gradient, gradient), decoupled_gradients(by_hand)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("prior", ["uniform", "geometric"])
def test_depths_are_drawn_from_the_prior_by_seed_and_step(prior: str) -> None:
    objective, steps = Objective(name="random_depth", prior=prior, truncated=2), 2000  # type: ignore[arg-type]

    def depths(seed: int) -> list[Unrolling | None]:
        return [draw_unrolling(objective, 6, seed, step) for step in range(steps)]

    drawn = depths(0)
    assert drawn == depths(0) != depths(1)
    assert {each.truncated for each in drawn if each is not None} == {2}
    found = [each.loops for each in drawn if each is not None]
    shares = np.array([Counter(found)[loop] / steps for loop in range(1, 7)])
    pi = depth_prior(objective, 6).numpy()
    assert (np.abs(shares - pi) < 4 * np.sqrt(pi * (1 - pi) / steps)).all()
    assert expected_loops(objective, 6) == pytest.approx(np.mean(found), abs=0.2)
    assert draw_unrolling(Objective(), 6, 0, 0) is None


def random_depth_losses(loops: int, truncated: int | None) -> tuple[Tensor, dict[str, Tensor], int]:
    """The losses [1, B] of a model's first batch, their gradients, and how often the block was applied."""
    run = tiny_settings("objective.name=random_depth")
    model, calls = initial_model(run), []
    model.block[0].attention_norm.register_forward_hook(lambda *_: calls.append(0))  # type: ignore[operator, union-attr]
    losses = AnswerLosses(model)(training_batches(run)(0), CPU, Unrolling(loops, truncated)).cross_entropy
    losses.mean().backward()  # type: ignore[no-untyped-call]
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return losses.detach(), gradients, len(calls)


def test_only_the_loops_that_are_drawn_are_run_and_a_truncated_gradient_ends_before_the_first() -> None:
    """By hand: the input of the last loop is a constant."""
    run = tiny_settings("objective.name=random_depth")
    model, batch = initial_model(run), training_batches(run)(0)
    answers = AnswerLosses(model)(batch, CPU).cross_entropy
    for number in (1, 2, 3):
        losses, _, applied = random_depth_losses(number, None)
        assert applied == number
        assert torch.allclose(losses[0], answers[number - 1], atol=1e-5)
    found, whole, every = (random_depth_losses(3, truncated)[1] for truncated in (1, None, 3))
    assert all(torch.equal(value, every[name]) for name, value in whole.items())
    tokens, lengths = torch.from_numpy(batch.tokens), torch.from_numpy(batch.lengths)
    with torch.no_grad():
        *_, state = model.unroll(model.begin(tokens, lengths), 2)
    last = model.predict(model.pooled(model.step(state), lengths - 1))
    torch.nn.functional.cross_entropy(last, torch.from_numpy(batch.labels)).backward()  # type: ignore[no-untyped-call]
    for name, value in model.named_parameters():
        assert value.grad is not None
        assert torch.allclose(found[name], value.grad, atol=1e-6), name
    assert not torch.allclose(found["block.0.mlp_in.weight"], whole["block.0.mlp_in.weight"], atol=1e-6)
