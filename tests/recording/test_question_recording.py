"""Recording a benchmark: is it what the model says of every question, whatever happened on the way?"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_slices import DATA, byte_pairs
from tiny_language import change_tokenizer, write_ouro

import loopscope as ls
from loopscope.engine.replay_agreement import compare_with_replay
from loopscope.engine.scheduler import run
from loopscope.models.tokenizer import load_tokenizer
from loopscope.questions import BENCHMARKS, EncodedQuestion, Question, benchmark_named, encode_questions, load_questions
from loopscope.readouts.signals import SIGNALS
from loopscope.recording import question_recording
from loopscope.recording.question_recording import question_requests, record_benchmark
from loopscope.recording.recording_folder import unfinished_folder

BATCH = 3000
"""Tokens: a few batches of the questions below."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven questions with three, four and five choices, which have eight shots, and a few of MMLU."""
    folder = tmp_path_factory.mktemp("data")
    lines = (DATA / "arc_challenge" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "arc_easy").mkdir()
    shutil.copy(DATA / "arc_easy" / "train.jsonl", folder / "arc_easy")
    chosen = [lines[number] for number in (0, 70, 1, 112, 2, 3, 4)]
    (folder / "arc_easy" / "test.jsonl").write_text("\n".join(chosen) + "\n", encoding="utf-8")
    for subject in ("anatomy", "global_facts"):
        shutil.copytree(DATA / "mmlu" / subject, folder / "mmlu" / subject)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ouro(tmp_path_factory.mktemp("checkpoint"), byte_pairs())


Record = Callable[..., ls.Trajectory]


@pytest.fixture(scope="module")
def recording(checkpoint: Path, data: Path) -> Record:
    def made(out: Path, benchmark: str = "arc_easy", **options: Any) -> ls.Trajectory:
        options = {"data": data, "batch_tokens": BATCH, **options}
        return record_benchmark(checkpoint, benchmark, options.pop("split", "test"), out, **options)

    return made


@pytest.fixture(scope="module")
def whole(recording: Record, tmp_path_factory: pytest.TempPathFactory) -> ls.Trajectory:
    return recording(tmp_path_factory.mktemp("whole") / "test", hidden=True)


def encoded_questions(
    checkpoint: Path, data: Path, benchmark: str = "arc_easy"
) -> tuple[list[Question], list[EncodedQuestion]]:
    questions = load_questions(BENCHMARKS[benchmark], "test", data, 6 if benchmark == "mmlu" else None)
    return questions, encode_questions(questions, load_tokenizer(checkpoint))


@torch.inference_mode()
def test_it_is_what_the_model_says(whole: ls.Trajectory, checkpoint: Path, data: Path) -> None:
    model, (questions, encoded) = ls.load_model(checkpoint), encoded_questions(checkpoint, data)
    assert [len(question.choices) for question in questions] == [4, 5, 4, 3, 4, 4, 4]
    assert whole.logits.shape == (7, 4, 5)
    assert np.isneginf(whole.logits).sum() == 4 * (5 * 1 + 2)
    assert whole.norms.shape == (7, 5)
    likely = np.full(whole.logits.shape, -np.inf)
    for row, (question, tokens) in enumerate(zip(questions, encoded, strict=True)):
        context = torch.from_numpy(tokens.context)[None]
        out = model.loops(context, positions=torch.tensor([context.shape[1] - 1]))
        assert whole.hidden[row] == pytest.approx(out.hidden[:, 0].numpy(), abs=1e-4)
        assert whole.gate_logits[row] == pytest.approx(out.gate_logits[:, 0].numpy(), abs=1e-4)
        for choice, ending in enumerate(tokens.choices):
            text = torch.from_numpy(np.concatenate((tokens.context, ending)))
            log_p = model.loops(text[None, :-1]).logits[:, 0].double().log_softmax(-1)
            places = range(len(tokens.context), len(text))
            likely[row, :, choice] = sum(log_p[:, place - 1, text[place]] for place in places)
        assert whole.norms[row, : len(question.norms)].tolist() == list(question.norms)
        there = slice(len(question.choices))
        assert whole.logits[row, :, there] == pytest.approx(likely[row, :, there] / question.norms, abs=1e-4)
    assert whole.labels.tolist() == [question.label for question in questions]
    right = (likely / whole.norms[:, None]).argmax(-1) == whole.labels[:, None]
    assert np.array_equal(whole.correct, right)
    for text, question in zip(whole.examples, questions, strict=True):
        key, _, shown = text.partition(": ")
        prompt, *choices = shown.rsplit("\n", len(question.choices))
        assert key == question.key
        assert question.context.endswith(prompt)
        assert choices == [f"{letter}.{choice}" for letter, choice in zip("ABCDE", question.choices, strict=False)]

    told = {"benchmark": "arc_easy", "metric": "acc_norm", "shots": 8, "examples": 7, "limit": None, "cut": 0}
    assert told.items() <= whole.provenance.items()
    assert whole.split == "test"
    assert whole.provenance["weights_sha256"] == model.weights_sha256


def test_what_is_not_kept_is_not_missed(recording: Record, whole: ls.Trajectory, tmp_path: Path) -> None:
    """Signals of the hidden states are there without them."""
    lean = recording(tmp_path / "lean")
    assert lean.hidden is None
    for name in SIGNALS:
        assert np.array_equal(ls.signal(name, lean), ls.signal(name, whole), equal_nan=True), name


@pytest.mark.parametrize("benchmark", ["arc_easy", "mmlu"])
def test_replay_equals_live(
    benchmark: str, recording: Record, whole: ls.Trajectory, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    recorded = whole if benchmark == "arc_easy" else recording(tmp_path / "mmlu", "mmlu", hidden=True, limit=6)
    questions, encoded = encoded_questions(checkpoint, data, benchmark)
    assert any(tokens.prefix for tokens in encoded) == (benchmark == "mmlu")
    assert [text.partition(":")[0] for text in recorded.examples] == [question.key for question in questions]
    requests = question_requests(questions, encoded, BENCHMARKS[benchmark].metric)
    model = ls.load_model(checkpoint)
    for readout in ("gate", "margin", "kl", "hidden_cosine"):
        values = np.sort(ls.signal(readout, recorded)[:, int(readout in ("kl", "hidden_cosine"))])
        policy = ls.ExitPolicy(readout, float(values[2:4].mean()))  # a few exit as early as can be
        loops = policy.exit_loops(recorded)
        assert len(set(loops)) > 1
        for batch_size in (1, 3, 100):
            answers = list(run(model, requests, policy, batch_size))
            assert compare_with_replay(answers, policy, recorded).differing == 0
            for answer in answers:
                expected = recorded.logits[answer.key, answer.loop - 1, : len(answer.logits)]
                assert answer.logits == pytest.approx(expected, abs=1e-4)


class Interrupted(Exception):  # noqa: N818 - nothing is wrong
    pass


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The questions that are scored from now on; everything is saved at once."""
    keys: list[int] = []
    real = question_recording.score_all_loops

    def counted(model: Any, requests: Any, *rest: Any) -> Any:
        keys.extend(request.key for request in requests)
        return real(model, requests, *rest)

    monkeypatch.setattr(question_recording, "score_all_loops", counted)
    monkeypatch.setattr(question_recording, "_KEEP_EVERY_SECONDS", -1.0)
    return keys


def interrupted_at(share: float) -> Callable[[int, int, str], None]:
    def progress(done: int, total: int, note: str) -> None:
        if done >= share * total:
            raise Interrupted

    return progress


def test_an_interrupted_recording_goes_on(
    recording: Record, whole: ls.Trajectory, scored: list[int], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        with pytest.raises(Interrupted):
            recording(out, hidden=True, progress=interrupted_at(0.6))
    assert not out.exists()
    with pytest.raises(ls.UserError, match="out.unfinished holds another unfinished recording; choose another --out"):
        recording(out, mean=True)
    first, told = scored.copy(), []
    assert 0 < len(set(first)) < len(first)  # only the batch that was not saved any more was run again
    after = recording(out, hidden=True, progress=lambda *advance: told.append(advance[:2]))
    assert sorted({*first, *scored[len(first) :]}) == list(range(7))
    kept = {*first} - {*scored[len(first) :]}
    assert kept  # never scored again
    assert told[0] == (len(kept), 7)
    assert told[-1] == (7, 7)
    for name in ("logits", "hidden", "gate_logits", "labels", "norms"):
        assert np.array_equal(getattr(after, name), getattr(whole, name)), name
    assert after.sha256 == whole.sha256
    assert after.examples == whole.examples
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_same_recording_is_used_again_and_another_refused(
    recording: Record, scored: list[int], checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = recording(out, limit=3)
    assert len(scored) == 3
    assert recording(out, limit=3).sha256 == first.sha256
    assert len(scored) == 3
    for change in ({"limit": 2}, {"mean": True}, {"hidden": True}, {"dtype": "bfloat16"}, {"shard": (0, 2)}):
        with pytest.raises(ls.UserError, match="holds another recording .*choose another --out"):
            recording(out, **{"limit": 3, **change})
    changed = shutil.copytree(checkpoint, tmp_path / "changed")
    change_tokenizer(changed / "tokenizer.json")
    with pytest.raises(ls.UserError, match=r"holds another recording \(of another tokenization"):
        record_benchmark(changed, "arc_easy", "test", out, data=data, limit=3)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ls.UserError, match="exists and is not a recording; choose another place"):
        recording(tmp_path / "mine", limit=3)
    assert len(scored) == 3  # nothing was computed in vain


def test_parts_together_are_the_whole(recording: Record, whole: ls.Trajectory, tmp_path: Path) -> None:
    for number in range(2):
        part = recording(tmp_path / str(number), shard=(number, 2))
        rows = np.arange(number, 7, 2)
        wide = part.logits.shape[2]
        assert part.logits == pytest.approx(whole.logits[rows, :, :wide], abs=1e-5)
        assert np.isneginf(whole.logits[rows, :, wide:]).all()
        assert part.gate_logits == pytest.approx(whole.gate_logits[rows], abs=1e-5)
        assert part.labels.tolist() == whole.labels[rows].tolist()
        assert part.norms.tolist() == whole.norms[rows, :wide].tolist()
        assert part.examples == [whole.examples[row] for row in rows]
    for wrong in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ls.UserError, match="one of n, counted from 0"):
            recording(tmp_path / "wrong", shard=wrong)


@torch.inference_mode()
def test_gate_and_state_over_the_choices(
    recording: Record, whole: ls.Trajectory, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    averaged = recording(tmp_path / "mean", mean=True, hidden=True, limit=3)
    model, (_, encoded) = ls.load_model(checkpoint), encoded_questions(checkpoint, data)
    for row, tokens in enumerate(encoded[:3]):
        states = []
        for choice in tokens.choices:
            text = torch.from_numpy(np.concatenate((tokens.context, choice)))
            states.append(model.loops(text[None]).hidden[:, 0, len(tokens.context) :])
        mean = torch.cat(states, dim=1).mean(dim=1)
        assert averaged.hidden[row] == pytest.approx(mean.numpy(), abs=1e-4)
        assert averaged.gate_logits[row] == pytest.approx(model.halt(mean).numpy(), abs=1e-4)
    assert averaged.logits == pytest.approx(whole.logits[:3], abs=1e-5)
    assert averaged.provenance["state"] != whole.provenance["state"]


def test_low_precision_is_close(recording: Record, whole: ls.Trajectory, tmp_path: Path) -> None:
    low = recording(tmp_path / "low", dtype="bfloat16", limit=3)
    assert low.logits == pytest.approx(whole.logits[:3], abs=0.1)
    assert low.logits != pytest.approx(whole.logits[:3], abs=1e-6)
    assert low.provenance["dtype"] == "bfloat16"


def test_other_shots_are_other_questions(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    def recorded(shots: int | None) -> ls.Trajectory:
        return record_benchmark(checkpoint, "arc_easy", "test", tmp_path / str(shots), data=data, shots=shots)

    own, none = recorded(None), recorded(0)
    assert (own.provenance["shots"], none.provenance["shots"]) == (8, 0)
    assert own.provenance["questions_sha256"] != none.provenance["questions_sha256"]
    assert own.logits is not None
    assert none.logits is not None
    assert not np.allclose(own.logits, none.logits)
    asked = load_questions(BENCHMARKS["arc_easy"], "test", data)[0].context
    alone = load_questions(benchmark_named("arc_easy", 0), "test", data)[0].context
    assert asked.endswith(alone)
    assert len(asked) > len(alone)
    with pytest.raises(ls.UserError, match="ARC-Easy"):
        recorded(10_000)


def test_unfinished_parts_lie_beside_the_folder_whatever_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert unfinished_folder(Path()) == unfinished_folder(Path()) == Path(f"{tmp_path}.unfinished")
    assert unfinished_folder(Path("out")) == tmp_path / "out.unfinished"
