"""Would it run on a GPU, and would the host keep ahead of it? Everything once on a pretended one, beside the CPU.

What is fetched at a loop step of rows: the one array that decides who exits, and the answers of who does. Of greedy
text it is one array, but for policies that look at a gate or at states; and one more, where tokens are drawn.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GATED, GOLDEN, TINY, tiny_language_run, tiny_settings
from pretended_device import PretendedDevice, PretendedTensor, pretended_device

import loopscope as ls
from loopscope.bench.exit_timing import bench_exits, random_model
from loopscope.bench.measure import interleaved
from loopscope.cli import main
from loopscope.engine.decoder import CACHE_MODES, CacheMode, Decoder
from loopscope.engine.generation import Prompt, generate, stream
from loopscope.engine.requests import Request, choices
from loopscope.engine.sampling import Sampling
from loopscope.engine.scheduler import _RunningBatch, run
from loopscope.engine.wavefront import Wavefront
from loopscope.models.device import check_device
from loopscope.models.looped_model import LoopedModel
from loopscope.progress import silent
from loopscope.recording.question_recording import score_all_loops
from loopscope.recording.recording_folder import Keep
from loopscope.recording.task_recording import record_task
from loopscope.recording.text_recording import record_text
from loopscope.training.language_run import LanguageRun
from loopscope.training.task_run import train
from loopscope.training.training_loop import train_run

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
THRESHOLDS = {"margin": 0.3, "gate": 0.6, "hidden_change": 1.0, "entropy": 3.0, "kl": 0.05, "fixed": 2}
POLICIES = [ls.ExitPolicy(readout, threshold) for readout, threshold in THRESHOLDS.items()]
MOST_WAITS = 2
"""Of a loop step."""


@pytest.fixture
def device() -> Iterator[PretendedDevice]:
    with pretended_device() as device:
        yield device


@pytest.fixture
def steps(device: PretendedDevice, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the host had waited when each loop step began."""
    begun: list[int] = []
    step, advance, wave = Decoder.step, _RunningBatch.advance, Wavefront.advance

    def noted(call: Any, *given: Any) -> Any:
        begun.append(sum(device.waits.values()))
        return call(*given)

    monkeypatch.setattr(Decoder, "step", lambda self: noted(step, self))
    monkeypatch.setattr(Wavefront, "advance", lambda self: noted(wave, self))
    monkeypatch.setattr(_RunningBatch, "advance", lambda self, new: noted(advance, self, new))
    return begun


@contextmanager
def bounded(device: PretendedDevice, steps: list[int], most: int = MOST_WAITS) -> Iterator[None]:
    """Holds the waits of every loop step."""
    steps.clear()
    with device.counted() as waits:
        yield
    each = np.diff([*steps, sum(waits.values())])
    print(f"{len(each)} steps, at most {each.max()} waits in one, {each.mean():.2f} on average")
    assert each.max() <= most, waits.most_common()


def both(name: str = "ouro-tiny") -> tuple[LoopedModel, LoopedModel]:
    """A model here and there."""
    return ls.load_model(GOLDEN / name), ls.load_model(GOLDEN / name, "cuda:0")


def prompts(count: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(key, rng.integers(0, 40, rng.integers(3, 12))) for key in range(count)]


def questions(shared: int, vocabulary: int, whole: bool = False) -> list[Request]:
    rng = np.random.default_rng(1)
    beginning = rng.integers(0, vocabulary, shared)
    contexts = [np.concatenate((beginning, rng.integers(0, vocabulary, rng.integers(2, 9)))) for _ in range(6)]
    parts = [[rng.integers(0, vocabulary, rng.integers(1, 4)) for _ in range(3)] for _ in contexts]
    return [
        choices(key, context, each, shared=shared, whole=whole)
        for key, (context, each) in enumerate(zip(contexts, parts, strict=True))
    ]


def test_the_pretended_device_refuses_and_counts(device: PretendedDevice) -> None:
    there = torch.arange(6.0, device="cuda:0")
    with pytest.raises(RuntimeError, match="of cuda:0 and of the CPU"):
        there + torch.ones(6)
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    with device.counted() as waits:
        (there[1:] * 2).view(5, 1).sum()
        torch.ones(3).pin_memory().to("cuda:0", non_blocking=True)
        assert not waits
        for wait in (
            lambda: bool(there.any()),
            lambda: there.sum().item(),
            lambda: there.tolist(),
            lambda: there.cpu(),
            lambda: there[there > 2],
            lambda: there.nonzero(),
            lambda: torch.ones(3).to("cuda:0"),
            lambda: torch.ones(3).pin_memory().to("cuda:0"),
            lambda: torch.repeat_interleave(there, torch.ones(6, dtype=torch.long, device="cuda:0")),
        ):
            before = sum(waits.values())
            wait()
            assert sum(waits.values()) == before + 1
    with torch.inference_mode(), device.counted() as waits:
        assert there.sum().item() == 15
        assert sum(waits.values()) == 1


def test_nothing_is_left_of_the_pretended_device() -> None:
    before = torch.tensor, torch.Tensor.pin_memory, torch.cuda.is_available
    with pretended_device():
        assert check_device("auto") == CUDA
    assert before == (torch.tensor, torch.Tensor.pin_memory, torch.cuda.is_available)
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        assert check_device("auto") == CPU


def same_training(here: Path, there: Path) -> None:
    """The losses, and the norms of the gradients, of all steps; weights whose gradient is 0 follow the rounding."""
    for ours, theirs in zip(
        *((folder / "metrics.jsonl").read_text().splitlines() for folder in (here, there)), strict=True
    ):
        expected = json.loads(ours)
        for name, values in json.loads(theirs).items():
            assert values == pytest.approx(expected[name], rel=1e-3), (expected["step"], name)


def test_training_a_task(device: PretendedDevice, tmp_path: Path) -> None:
    settings = tiny_settings(*GATED, "training.steps=3", "training.log_every=1", "training.bf16=false")
    for name, where in (("here", CPU), ("there", CUDA)):
        with device.counted() as waits:
            train(settings, tmp_path / name, where)
    same_training(tmp_path / "here", tmp_path / "there")
    slowing = [line for line in waits if line.split(", ")[1].startswith(("models/", "engine/"))]
    assert not slowing  # the host waits when it logs, validates and saves, not in the model


def test_training_a_language_model(device: PretendedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretendedTensor, "bfloat16", lambda self: self)  # in which Muon works on CUDA
    runs = []
    for name, where in (("here", CPU), ("there", CUDA)):
        (tmp_path / name).mkdir()
        runs.append(
            tiny_language_run(tmp_path / name, "training.steps=2", "training.log_every=1", "training.bf16=false")
        )
        train_run(runs[-1], where)
    same_training(runs[0].folder, runs[1].folder)


def test_recordings(device: PretendedDevice, gated_run: Path, tiny_ouro: LanguageRun, tmp_path: Path) -> None:
    def recorded(name: str, where: str) -> list[ls.Trajectory]:
        keep = Keep(hidden=True)
        task = record_task(gated_run, "test", tmp_path / f"{name}-task", keep, 40, device=where)
        text = record_text(
            tiny_ouro.folder, tiny_ouro.validation, "validation", tmp_path / f"{name}-text", limit=200, device=where
        )
        return [task, text]

    for here, there in zip(recorded("here", "cpu"), recorded("there", "cuda:0"), strict=True):
        assert there.gate_logits == pytest.approx(here.gate_logits, abs=1e-4)
        for name, values in here.signals.items():
            assert there.signals[name] == pytest.approx(values, abs=1e-3, nan_ok=True)
        assert (there.predicted == here.predicted).mean() > 0.99


@pytest.mark.parametrize("kind", ["rows", "questions"])
@pytest.mark.parametrize(("policy", "shared"), list(zip(POLICIES, (0, 5) * 3, strict=True)), ids=str)
def test_the_engine(policy: ls.ExitPolicy, shared: int, kind: str, device: PretendedDevice, steps: list[int]) -> None:
    (here, there), rng, options = both(), np.random.default_rng(0), {"batch_size": 5}
    asked = [Request(key, (rng.integers(0, here.vocab_size, rng.integers(3, 12)),)) for key in range(12)]
    if kind == "questions":
        asked = questions(shared, here.vocab_size, whole=True)
        options = {"batch_size": 4, "mean": policy.readout == "gate", "greedy": True}
    expected = list(run(here, asked, policy, **options))
    with bounded(device, steps):
        answers = list(run(there, asked, policy, **options))
    for ours, theirs in zip(answers, expected, strict=True):
        assert (ours.key, ours.loop) == (theirs.key, theirs.loop)
        np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-4)
        assert np.array_equal(ours.greedy, theirs.greedy)


@pytest.mark.parametrize("name", ["ouro-tiny", "huginn-tiny"])
def test_scoring_a_benchmark(name: str, device: PretendedDevice) -> None:
    here, there = both(name)
    asked = questions(4, here.vocab_size)
    expected, found = (score_all_loops(model, asked) for model in (here, there))
    np.testing.assert_allclose(found.log_likelihoods, expected.log_likelihoods, atol=1e-4)
    np.testing.assert_allclose(found.hidden, expected.hidden, atol=1e-4)


def lossless(temperature: float) -> dict[str, Any]:
    return {"batch_size": 4, "max_new_tokens": 6, "lossless": True, "sampling": Sampling(temperature=temperature)}


def text_waits(policy: ls.ExitPolicy) -> int:
    """Greedy text fetches signals of logits with the tokens; those of a gate and of states come before."""
    return 2 if policy.readout in ("gate", "hidden_change") else 1


SEVERAL = [Prompt(each.key, each.tokens, policy=policy) for each, policy in zip(prompts(4), POLICIES, strict=False)]
TEXTS = [
    *(
        (policy, prompts(rows), text_waits(policy), {"batch_size": rows, "max_new_tokens": 4, "cache": cache})
        for rows in (1, 4)
        for policy, cache in zip(POLICIES, CACHE_MODES * 2, strict=True)
    ),
    (POLICIES[0], prompts(4), 1, lossless(0.0)),
    (POLICIES[0], prompts(4), MOST_WAITS, lossless(1.0)),
    (ls.ExitPolicy("fixed", 1), prompts(4), 1, lossless(0.0)),
    (None, SEVERAL, 1 + 2, {"batch_size": 4, "max_new_tokens": 4}),
]
"""Policy, prompts, how often the host may wait in a step, and options."""


@pytest.mark.parametrize(("policy", "asked", "most", "options"), TEXTS)
def test_generation(
    policy: Any, asked: list[Prompt], most: int, options: dict[str, Any], device: PretendedDevice, steps: list[int]
) -> None:
    here, there = both()
    expected = generate(here, asked, policy, **options)
    with bounded(device, steps, most):
        texts = generate(there, asked, policy, **options)
    for ours, theirs in zip(texts, expected, strict=True):
        assert (ours.tokens, ours.loops) == (theirs.tokens, theirs.loops)  # what is drafted depends on the machine
    assert (sum(text.drafted for text in texts) > 0) == ("lossless" in options)


@pytest.mark.parametrize("cache", CACHE_MODES)
def test_generation_by_a_head_that_attends(cache: CacheMode, device: PretendedDevice, steps: list[int]) -> None:
    here, there = both("huginn-tiny")
    asked, policy = prompts(3), ls.ExitPolicy("margin", 0.05)
    options: dict[str, Any] = {"max_new_tokens": 2, "cache": cache, "batch_size": 2, "with_logits": True}
    options["sampling"] = Sampling(temperature=1.0, top_k=9, top_p=0.9)
    expected = list(stream(here, asked, policy, **options))
    with bounded(device, steps):
        tokens = list(stream(there, asked, policy, **options))
    for ours, theirs in zip(tokens, expected, strict=True):
        assert (ours.key, ours.token, ours.loops) == (theirs.key, theirs.token, theirs.loops)
        torch.testing.assert_close(ours.logits.cpu(), theirs.logits, atol=1e-4, rtol=1e-4)


def test_selfcheck_takes_the_device_and_says_so(device: PretendedDevice, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["selfcheck", str(GOLDEN / "ouro-tiny"), "--only", "batch"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.err.count("Device: cuda:0 (--device cpu takes the CPU).") == 1
    assert "float32 on cuda:0" in said.out
    assert main([*words, "--device", "cpu"]) == 0
    assert "Device" not in capsys.readouterr().err


def test_a_bench_measures_the_device_that_is_benched(device: PretendedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waited.append(1))
    weights = torch.zeros(8, 8, dtype=torch.bfloat16, device="cuda:0")
    _, machine = interleaved({"a": lambda: None}, 1, 8, silent, weights)
    assert (machine.device, machine.dtype) == ("cuda:0", "bfloat16")
    assert len(waited) == 6  # before and after each of two timings, and before each rate
    _, machine = interleaved({"a": lambda: None}, 1, 8, silent)
    assert (machine.device, machine.dtype) == ("cpu", "float32")


def test_exits_are_timed_there(device: PretendedDevice) -> None:
    overrides = [*TINY, *GATED]
    benched = random_model("demo", overrides, 40, 2.0, ["margin", "gate"], "cuda:0")
    result = bench_exits(benched, rounds=1, batch_size=16, waiting=True, progress=silent)
    assert result.machine.device == "cuda:0"
    for timing in result.policies:
        assert timing.agreement.differing == 0
        assert timing.waiting_realised is not None


def test_artifacts_do_not_know_the_word_auto(
    device: PretendedDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def steps(*words: str) -> Any:
        assert main(["study", "plan", "demo", "--out", str(tmp_path), "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)["steps"]

    assert steps() == steps("--device", "auto") == steps("--device", "cuda") != steps("--device", "cpu")
