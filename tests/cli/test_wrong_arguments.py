"""Are wrong arguments answered before anything heavy is imported, and with what was probably meant?"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import loopscope as ls
from cli.conftest import Command
from loopscope.artifacts import MANIFEST
from loopscope.certify.live_runs import LIVE
from loopscope.config import plain, to_json
from loopscope.models.checkpoint_folder import CheckpointConfig
from loopscope.scope import Scope
from loopscope.training.settings import read_settings

HEAVY = ("torch", "lm_eval", "transformers")
ANSWER = """
import io, json, sys
from contextlib import redirect_stderr
from loopscope.cli import main
answers = []
for words in json.loads(sys.argv[1]):
    with redirect_stderr(io.StringIO()) as err:
        code = main(words)
    heavy = [name for name in sys.argv[2:] if name in sys.modules]
    answers.append([code, err.getvalue(), heavy])
print(json.dumps(answers))
"""
_TWO_STEPS = ("--set", "training.steps=2")


def _write_run(folder: Path) -> None:
    """What the files of a finished run say of it."""
    settings = read_settings("demo")
    config = CheckpointConfig(
        vocab_size=settings.task.vocab_size, block_size=settings.block_size, model=settings.model, run=plain(settings)
    )
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(to_json(config))
    (folder / "model.safetensors").write_bytes(b"")


def test_what_was_meant_is_named_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    """Every wrong command in one process, one after the other: what a later one finds imported, an earlier one did."""
    place = tmp_path
    out, folder = str(place / "out"), str(place / "mine")
    test = f"{folder}/test"
    for name in ("validation", "test", "text"):
        logits, split = [[[0.0, 1.0], [1.0, 0.0]]] * 4, "test" if name == "text" else name
        ls.Trajectory(logits=logits, labels=[0] * 4, split=split).save(Path(folder) / name)
    for name, file, content in (("ouro", "config.json", {"model_type": "ouro"}), ("live", MANIFEST, {"kind": LIVE})):
        (place / name).mkdir()
        (place / name / file).write_text(json.dumps(content))
    file, model, policy = str(place / "examples.txt"), str(place / "model"), str(place / "answers.json")
    Path(file).write_text("+ 1 0\n")
    (place / "empty").mkdir()
    Path(model).mkdir()  # all that is asked of it here
    (place / "model" / "tokenizer.json").write_text("{}")
    config = {"model_type": "ouro", "total_ut_steps": 4, "max_position_embeddings": 256}
    (place / "model" / "config.json").write_text(json.dumps(config))
    ls.ExitPolicy("margin", 0.5, scope=Scope(unit="answers")).save(policy)
    trained = str(place / "trained")
    _write_run(Path(trained))
    (place / "trained" / "recordings").symlink_to(folder)
    foreign, bad, two = str(place / "foreign.json"), str(place / "bad.txt"), str(place / "two.json")
    ls.ExitPolicy("margin", 0.5, scope=Scope(model="0" * 64)).save(foreign)
    ls.ExitPolicy("fixed", 99).save(two)
    Path(bad).write_text("hello\n")
    lines, blank, full = str(place / "lines.jsonl"), str(place / "blank.txt"), str(place / "full.json")
    Path(lines).write_text('{"text": "a"}\n{"txt": "b"}\n')
    Path(blank).write_text("\n")
    ls.ExitPolicy("margin", 0.5, scope=Scope(unit="tokens", cache="full")).save(full)
    wrong: list[tuple[list[str], str]] = [
        (["trian", "demo"], "did you mean 'train'?"),
        (["train", "demo", "--outt", out], "no option --outt (did you mean '--out'?)"),
        (["train", "demo", "--out", out, "--set", "training.step=3"], "unknown key `step` (did you mean 'steps'?)"),
        (["train", "demo", "--out", str(place)], "exists and is not a run; choose another --out"),
        (["train", "demo", "--out", trained, *_TWO_STEPS], "trained holds a run with other settings (training.steps)"),
        (["record", "text", model, lines, "--out", out], "Line 2 of "),
        (["record", "text", model, blank, "--out", out], "There is no text in "),
        (["record", "live", model, file, "--recording", test, "--policy", full, "--out", out], "--cache full"),
        (
            ["record", "live", model, file, "--recording", test, "--max-drop=2", "--out", out],
            "between 0 and 1, such as 0.01",
        ),
        (["loop", file, "--prelude=1", "--core=1", "--loops=2", "--out", out], "is a file; give the folder of a"),
        (["train", "demo", "--out", out, "--device", "gpu"], "There is no device 'gpu' (did you mean 'cuda'?); choose"),
        (["report", folder, "--refrence", "x"], "loopscope: There is no option --refrence (did you mean"),
        (["pretrain", "x.toml", "--text", "a", "--validation", "b", "--out", out], "There is no file x.toml"),
        (["record", "task", str(place / "run"), "--split", "test"], "There is no folder"),
        (["record", "text", "nowhere", file, "--out", out], "There is no folder nowhere"),
        (["sweep", folder, "--readout", "margn"], "did you mean 'margin'?"),
        (["check", folder, "--policy", "policy.json"], "There is no file policy.json"),
        (["diagnose", str(place / "ouro")], "make it with: loopscope record text "),
        (["diagnose", str(place / "live")], "is a live run, which only `loopscope calibrate` and `loopscope check"),
        (["diagnose", str(place)], "has no recording 'validation'; give one of those in it that have: mine, trained."),
        (["report", folder, folder, "--out", out], "Two of the runs have the same name"),
        (["report", folder + "/test", "--out", out], "is one recording, and this needs two: one to choose thresholds"),
        (["diagnose", folder + "/validation"], f"judge them on; give the folder of both: {folder}."),
        (["sweep", folder + "/text"], "text is one recording, and this needs two: one to choose thresholds on and"),
        (["compare", folder + "/text", "margin", "entropy"], "or give both to `loopscope sweep VALIDATION TEST`."),
        (["diagnose", folder, "--reference", folder + "/text"], "give a folder that holds both, as `validation` and"),
        (["diagnose", folder + "s"], f"did you mean {folder}?"),
        (["diagnose", folder, "--reference", "mien"], "did you mean 'mine'?"),
        (["report", folder, "--out", out, "--reference", "nobody"], "There is no run 'nobody'"),
        (["report", folder, "--out", out, "--product", "headlin"], "no product 'headlin' (did you mean 'headline'?)"),
        (["calibrate", folder, "--unseen", "--out", out], "or say it (Trajectory(seen=...)), or ask for all"),
        (["calibrate", folder, "--bound", "betting", "--out", out], "--bound is for the losses of sequences"),
        (["calibrate", folder, "--max-drop", "0.3", "--out", out], "if exiting early lost nothing, a guarantee of"),
        (["fit", folder + "/test", "--kind", "induction", "--out", out], "A stopper must not be fitted on the"),
        (["fit", folder + "/validation", "--out", out], "or give them: Trajectory(hidden=...)"),
        (["fit", folder, "--out", out], f"save your own: Trajectory(...).save('{folder}/train')."),
        (["answer", folder, str(place / "exampels.txt")], "examples.txt?"),
        (["generate", model, "Once", "--loops", "9"], "A fixed depth of 9 is beyond the 4 loops"),
        (["generate", model, "Once", "--policy", policy], "calibrated on answers of a task, and here it would decide"),
        (["generate", model, "Once", "--policy", file], "is not a readable policy that"),
        (["generate", model, "Once", "--lossless", "--loops", "4"], "full depth drafts nothing"),
        (["generate", model, "Once", "--readout", "gate", "--threshold", "5"], "'gate' never reaches 5: its values"),
        (["generate", model, "Once", "--top-k", "5"], "--top-k needs --temperature; give it with"),
        (
            ["generate", model, "Once", "--with-readout", "nowhere.at:all"],
            "cannot be imported: ModuleNotFoundError: No module named",
        ),
        (["generate", file, "Once"], "examples.txt is a file; give the folder of a checkpoint"),
        (["generate", folder, "Once"], "holds recordings, and this needs the model"),
        (
            ["bench", "exits", folder],
            "that was recorded, or run a custom model from Python (docs/how-to/your-model.md).",
        ),
        (["generate", str(place / "empty"), "Once"], "is not a checkpoint: it has no config.json; give the folder of"),
        (["generate", trained, "Once"], "is a model of a task, which takes no text; record the task with `loopscope"),
        (["record", "task", trained, "--limit", "3"], "There is no option --limit; see loopscope record task --help"),
        (["compare", folder, "mine"], "Missing: OTHER: it takes one run and two readouts; another model's run comes"),
        (["compare", folder, "margin", "oracle"], "The oracle needs the labels, so only `loopscope sweep` takes it"),
        (["calibrate", folder, "--readout", "oracle", "--out", out], "choose one of auto, fixed, gate, entropy"),
        (["harness", model, "--tasks", "arc_easy", "--loops", "9"], "A fixed depth of 9 is beyond"),
        (["harness", model, "--tasks", "arc_easy", "--data", "nope"], "There is no file nope/arc_easy/train.jsonl"),
        (["record", "text", model, file, "--context", "1"], "A context of 1 tokens is not possible: choose 2 to 256"),
        (["record", "benchmark", model, "arc_easy", "--data", folder], "arc_easy/train.jsonl, which ARC-Easy needs"),
        (["bench", "generation", model, "--text", file, "--policy", policy], "answers of a task"),
        (["bench", "generation", model, "--text", file, "--policy", full, "--prompt-tokens=5000"], "more than the 256"),
        (["diagnose", file], "examples.txt is a file; give a run whose"),
        (["study", "plan", "nope.toml"], "There is no file nope.toml; give a TOML file, or one of: channels, demo"),
        (["record", "task", str(place / "empty"), "--split", "test"], "is not a run: it has no config.json; give a"),
        (["bench", "exits", "--settings", "papr"], "did you mean 'paper'?"),
        (["bench", "exits", trained, "--policy", foreign], "foreign.json was calibrated for another model than these"),
        (["bench", "exits", trained, "--policy", two], "A fixed depth of 99 is beyond the 4 loops"),
        (["answer", trained, bad, "--threshold", "1"], "line 1: 'hello' is not an expression in prefix notation"),
        (["study", "run", "ouro", "--data", "nope"], "There are no files of mmlu in nope/mmlu"),
        (["study", "plan", "ouro", "--benchmark", "arc"], "did you mean 'arc_easy' or 'arc_challenge'?"),
        (["study", "report", "mano", "--out", out], f"run it with: loopscope study run mano --out {out}."),
        (["study", "plan", "mano", "--set", "training.sede=1"], "training.sede=1: training: unknown key"),
    ]
    found = _answered([words for words, _ in wrong], place, HEAVY)
    for (words, message), (code, err, imported) in zip(wrong, found, strict=True):
        assert (code, imported, len(err.splitlines())) == (2, [], 1), (words, err)
        assert message in err, words


def _answered(wrong: list[list[str]], place: Path, heavy: Sequence[str]) -> list[tuple[int, str, list[str]]]:
    """The exit code, what is said, and what of the `heavy` is imported then, of each of these commands."""
    command = [sys.executable, "-c", ANSWER, json.dumps(wrong), *heavy]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=place).stdout)
    return [(code, err, imported) for code, err, imported in found]


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    for name, label in (("mine", 0), ("other", 1)):
        for scale, split in enumerate(("validation", "test"), start=1):
            logits = [[[0.0, scale], [scale, 0.0]]] * 4
            ls.Trajectory(logits=logits, labels=[label] * 4, split=split).save(tmp_path / name / split)
    (tmp_path / "empty").mkdir()
    wrong = {
        "empty is not a gate: it has no manifest.json": ["margin", "top1", "--fitted", "empty"],
        "needs the same examples in both recordings": ["margin", "margin", "--with", "other"],
        "'margin' is the same as itself": ["margin", "margin"],
        "The recording has no gate logits": ["gate", "margin"],
        "its model has no gate": ["margin", "gate", "--with", "mine"],
        "mine/validation: ": ["margin", "top1", "--unseen"],
    }
    found = _answered([["compare", "mine", *words] for words in wrong.values()], tmp_path, HEAVY)
    for message, (code, err, imported) in zip(wrong, found, strict=True):
        assert (code, imported, len(err.splitlines())) == (2, [], 1), err
        assert message in err


def test_a_task_of_lm_eval_is_looked_up_without_it(command: Command) -> None:
    sentence = command.refused("harness", "nowhere", "--tasks", "gsm8kk")
    assert "lm_eval has no task 'gsm8kk' (did you mean 'gsm8k'?)" in sentence
    assert "There is no file my.yaml" in command.refused("harness", "nowhere", "--tasks", "my.yaml")
    assert "There is no folder nowhere" in command.refused("harness", "nowhere", "--tasks", "gsm8k", "mmlu_anatomy")


def test_a_run_and_its_recordings_are_the_same(recorded: Path, tmp_path: Path, command: Command) -> None:
    folder = recorded / "recordings"
    forms = (recorded, folder)
    printed = set()
    for form in forms:
        printed.add(command("diagnose", form, "--json").out)
    for words in ((recorded,), (folder,), (folder / "validation", folder / "test"), (recorded, recorded)):
        printed.add(command("sweep", *words, "--readout", "margin", "--json").out)
    assert len(printed) == 2
    for form in forms:
        printed.add(command("report", form, "--out", tmp_path / "report", "--product", "headline", "--json").out)
    assert len(printed) == 3


def test_a_reference_is_a_folder_or_a_name(recorded: Path, tmp_path: Path, command: Command) -> None:
    runs = [tmp_path / name for name in ("one", "two")]
    for place in runs:
        place.mkdir()
        (place / "recordings").symlink_to(recorded / "recordings")
    printed = set()
    for reference in ("two", tmp_path / "two", tmp_path / "two" / "recordings"):
        printed.add(command("diagnose", runs[0], "--reference", reference, "--json").out)
    assert len(printed) == 1
    for given, reference in ((runs, "two"), (runs[:1], tmp_path / "two")):
        words = ("--reference", reference, "--product", "headline", "--out", tmp_path / "report", "--json")
        (table,) = command.json("report", *given, *words)
        assert "the reference" in str(table["rows"])
