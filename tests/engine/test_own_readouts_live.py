"""A readout of a user's own through the engine: rows, questions and texts exit where the replay says."""

from pathlib import Path

import numpy as np
import pytest
import torch
from plain_decoding import PlainDecoder
from tiny_language import MODELS, VOCABULARY

import loopscope as ls
from loopscope.engine.generation import Prompt, generate
from loopscope.engine.replay_agreement import compare_with_replay
from loopscope.engine.requests import Request, choices
from loopscope.engine.scheduler import Answer, run
from loopscope.models.model_settings import TransformerSettings
from loopscope.models.transformer import LoopedTransformer
from loopscope.readouts.readout import find_readout
from loopscope.readouts.replay import replayed
from loopscope.recording.recording_folder import Keep
from loopscope.trajectory import concatenate


def unchanged(answers, state):  # type: ignore[no-untyped-def]
    if state is None:
        return np.zeros(len(answers)), (answers, np.zeros(len(answers)))
    before, count = state
    count = np.where(answers == before, count + 1, 0)
    return count, (answers, count)


def lead(logits, state):  # type: ignore[no-untyped-def]
    """The margin, averaged with that of the loop before."""
    top = np.sort(np.where(np.isneginf(logits), -1e30, logits), axis=1).astype(float)
    margin = top[:, -1] - top[:, -2]
    return margin if state is None else (margin + state[0]) / 2, (margin,)


@pytest.fixture
def own(forgotten: None) -> None:
    ls.readout("unchanged", exits="above", reads="predictions")(unchanged)
    ls.readout("lead", exits="above", reads="logits")(lead)


@pytest.fixture(scope="module")
def model() -> LoopedTransformer:
    torch.manual_seed(0)
    return LoopedTransformer(TransformerSettings(layers=1, heads=2, width=32, loops=6, gate="linear"), 17, 12).eval()


def drawn(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 17, (count, 12)), rng.integers(3, 13, count)


def recorded(model: LoopedTransformer, seed: int, count: int, split: str, keep: Keep | None = None) -> ls.Trajectory:
    """What full depth says is the label: what an early exit can lose is the model's own answer."""
    tokens, lengths = drawn(seed, count)
    labels = ls.record_model(model, tokens, lengths).predicted[:, -1]
    return ls.record_model(model, tokens, lengths, labels, split=split, keep=keep or Keep(hidden=True))


def test_from_ten_lines_to_a_guarantee_that_runs(own: None, model: LoopedTransformer, tmp_path: Path) -> None:
    """Frontier beside the others, certified policy, file, and 2,000 examples live: none differs from the replay."""
    validation, test = recorded(model, 1, 600, "validation"), recorded(model, 2, 600, "test")
    frontiers = {name: ls.sweep(name, validation, test) for name in ("unchanged", "margin", "patience")}
    assert np.array_equal(frontiers["unchanged"].accuracy, frontiers["patience"].accuracy)
    assert len(set(frontiers["unchanged"].average_loops)) == 6
    ls.calibrate(validation, 0.1, readout="unchanged").save(tmp_path / "policy.json")
    policy = ls.ExitPolicy.load(tmp_path / "policy.json")
    assert policy.guarantee is not None
    tokens, lengths = drawn(2, 600)
    requests = [Request(row, (tokens[row, : lengths[row]],)) for row in range(600)]
    for batch_size in (64, 600):
        agreement = compare_with_replay(run(model, requests, policy, batch_size), policy, test)
        assert (agreement.examples, agreement.differing, agreement.close) == (600, 0, 0)
        assert 1 < agreement.average_loops == agreement.replayed_average_loops < 6


@pytest.mark.parametrize("readout", ["unchanged", "lead", "patience", "settling", "halting", "hidden_acceleration"])
def test_rows_exit_where_the_replay_says(readout: str, own: None, model: LoopedTransformer) -> None:
    test = recorded(model, 3, 200, "validation")
    values = ls.signal(readout, test)[:, :-1]
    found = np.unique(values[np.isfinite(values)])
    policy = ls.ExitPolicy(readout, float(found[len(found) // 2 - 1 : len(found) // 2 + 1].mean()))
    assert len(set(policy.exit_loops(test))) > 2
    tokens, lengths = drawn(3, 200)
    requests = [Request(row, (tokens[row, : lengths[row]],)) for row in np.random.default_rng(0).permutation(200)]
    for batch_size in (37, 200):
        agreement = compare_with_replay(run(model, requests, policy, batch_size), policy, test)
        assert agreement.differing == 0
        assert agreement.close <= 2


@pytest.mark.parametrize("readout", ["unchanged", "lead", "patience", "settling"])
def test_questions_with_few_and_many_choices_share_a_batch(readout: str, own: None, model: LoopedTransformer) -> None:
    rng = np.random.default_rng(0)
    asked = [
        choices(key, rng.integers(0, 17, 5), [rng.integers(0, 17, 2) for _ in range(2 + (key > 20) * int(key % 4))])
        for key in range(60)
    ]
    logits = np.full((60, 6, 5), -np.inf, np.float32)
    for depth in range(1, 7):
        for answer in run(model, asked, ls.ExitPolicy("fixed", depth)):
            logits[answer.key, depth - 1, : len(answer.logits)] = answer.logits
    recording = ls.Trajectory(logits=logits, labels=np.zeros(60, int))
    values = ls.signal(readout, recording)[:, :-1]
    found = np.unique(values[np.isfinite(values)])
    policy = ls.ExitPolicy(readout, float(found[len(found) // 2 - 1 : len(found) // 2 + 1].mean()))
    assert len(set(policy.exit_loops(recording))) > 1
    for batch_size in (1, 7, 60):
        assert compare_with_replay(run(model, asked, policy, batch_size), policy, recording).differing == 0


@pytest.mark.parametrize(
    ("readout", "threshold", "cache"),
    [
        ("unchanged", 0.5, "full"),
        ("lead", 0.35, "propagate"),
        ("patience", 1.5, "latest"),
        ("settling", -20.0, "propagate"),
        ("hidden_acceleration", 4.9, "full"),
    ],
)
def test_texts_exit_where_the_replay_says(
    readout: str, threshold: float, cache: str, own: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, rng, ouro = ls.ExitPolicy(readout, threshold), np.random.default_rng(0), MODELS["ouro"]()
    prompts = [Prompt(key, rng.integers(0, VOCABULARY, rng.integers(1, 9))) for key in range(3)]
    texts = generate(ouro, prompts, rule, max_new_tokens=5, cache=cache, batch_size=2)
    assert len({loop for text in texts for loop in text.loops}) > 1
    for prompt, text in zip(prompts, texts, strict=True):
        tokens, loops, _ = PlainDecoder(ouro, rule, cache, monkeypatch).generate(prompt.tokens.tolist(), 5)
        assert (tokens, loops) == (text.tokens, text.loops)


@pytest.mark.parametrize("readout", ["lead", "settling", "hidden_acceleration", "kl"])
def test_a_recording_without_logits_has_the_signal_all_the_same(
    readout: str, own: None, model: LoopedTransformer
) -> None:
    whole = recorded(model, 4, 100, "validation")
    bare = recorded(model, 4, 100, "validation", Keep(logits=False))
    assert bare.logits is None
    assert bare.hidden is None
    assert np.array_equal(ls.signal(readout, bare), ls.signal(readout, whole), equal_nan=True)
    assert np.array_equal(ls.signal("unchanged", bare), ls.signal("patience", whole))
    definition = find_readout(readout)
    assert definition is not None
    values = getattr(whole, str(definition.reads))
    assert np.array_equal(replayed(definition, values), ls.signal(readout, bare), equal_nan=True)


def test_a_recorded_signal_is_held_to_the_definition_it_was_recorded_with(
    own: None, model: LoopedTransformer, tmp_path: Path
) -> None:
    """Without its logits a recording has the signal of the readout as it was, whatever its name means now."""
    recorded(model, 4, 100, "validation", Keep(logits=False)).save(tmp_path / "bare")
    bare = ls.Trajectory.load(tmp_path / "bare")
    before = np.array(ls.signal("lead", bare))
    assert set(bare.provenance["signal_definitions"]) == {"lead"}

    def other(logits):  # type: ignore[no-untyped-def]
        return -lead(logits, None)[0]

    del ls.READOUTS["lead"]
    ls.readout("lead", exits="above", reads="logits")(other)
    for trajectory in (bare, ls.Trajectory.load(tmp_path / "bare"), bare.take(np.arange(50))):
        with pytest.raises(ls.UserError, match="'lead' was recorded with another definition"):
            ls.signal("lead", trajectory)
    again = recorded(model, 4, 100, "validation", Keep(logits=False))
    with pytest.raises(ls.UserError, match="differ in their definitions of signals"):
        concatenate([bare, again])
    assert not np.array_equal(ls.signal("lead", again), before)
    del ls.READOUTS["lead"]
    ls.register_readout(ls.Readout("lead", exits="below"))  # says when it exits, and nothing of its values
    assert np.array_equal(ls.signal("lead", bare), before)


def answers_at(loops: np.ndarray, trajectory: ls.Trajectory) -> list[Answer]:
    logits = np.eye(5, dtype=np.float32)
    return [
        Answer(row, int(loop), logits[trajectory.predicted[row, loop - 1]]) for row, loop in enumerate(loops.tolist())
    ]


def test_a_threshold_that_many_whole_numbers_meet_excuses_nothing(own: None) -> None:
    """A live run of 4.00 loops, a replay of about 2, and a threshold that every example meets: no agreement."""
    rng = np.random.default_rng(0)
    signals = {"margin": np.cumsum(rng.integers(1, 3, (400, 4)), axis=1)}
    trajectory = ls.Trajectory(predictions=rng.integers(0, 5, (400, 4)), labels=np.zeros(400, int), signals=signals)
    policy = ls.ExitPolicy("margin", 3)
    replayed_loops = policy.exit_loops(trajectory)
    assert (signals["margin"] == 3).any(axis=1).mean() > 0.5
    late = compare_with_replay(answers_at(np.full(400, 4), trajectory), policy, trajectory)
    assert late.average_loops == 4 > 2.5 > late.replayed_average_loops
    assert (late.differing, late.close, late.close_differing) == (400, 0, 0)
    assert compare_with_replay(answers_at(replayed_loops, trajectory), policy, trajectory).differing == 0


def test_a_close_call_excuses_only_what_it_explains() -> None:
    values = np.array([[1.0, 2.0 - 1e-9, 3.0, 4.0]] * 3)
    trajectory = ls.Trajectory(
        predictions=np.zeros((3, 4), int), labels=np.zeros(3, int), signals={"margin": values + 1e-12}
    )
    found = compare_with_replay(answers_at(np.array([2, 3, 4]), trajectory), ls.ExitPolicy("margin", 2.0), trajectory)
    assert found.close == 3
    assert found.close_differing == 1  # stops at 2, where rounding may decide; 3 is the replay's own
    assert found.differing == 1  # went past 3, where nothing is close
