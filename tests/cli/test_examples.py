"""Do the commands and the Python that the help, the README and the docs show run, and end as they say?

Each help and each page runs in its order in a folder of its own, on what a reader has by then (`example_world`). A
snippet that is added to one of them runs with the others.
"""

import io
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from conftest import verbs

import loopscope as ls
from cli.conftest import run
from cli.example_world import DATA, LAX, LONGER, MODELS, ROOT, SHORTLY, World
from loopscope.cli import main, make_parser

README = "README.md"
NOT_HERE = ("make", "git", "pip", "vllm", "podman", "curl", "python", "grep")
"""Programs that install something, or need what these tests do without."""
QUICK = ("calibrate", "compare", "check", "diagnose", "monitor", "sweep", "answer", "study plan", "study status")
QUICK += ("docs/explanation/diagnosis.md", "docs/how-to/certify.md", "docs/how-to/recordings.md")
"""What takes a few seconds at most on models that were trained shortly."""
ALIAS = {
    "RUN": "runs/demo/fixed-geometric",
    "VALIDATION": "runs/demo/fixed-geometric/recordings/validation",
    "TEST": "runs/demo/fixed-geometric/recordings/test",
    "gsm8k": "my_task.yaml",
}
"""Placeholders, and what is fetched from the Hub."""


Step = tuple[str, str]
"""A language, and a line of the shell or a block of another one."""


def shown(text: str | None) -> list[Step]:
    """The commands of a help: its indented lines that are no comments."""
    lines = re.findall(r"^  (\S.*)$", (text or "").replace("\\\n", ""), re.MULTILINE)
    return [("sh", line) for line in lines if not line.startswith("#")]


def snippets(page: str) -> list[Step]:
    found: list[Step] = []
    text = (ROOT / page).read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(sh|python|toml|text)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        parts = block.replace("\\\n", "").splitlines() if language == "sh" else [block]
        found += [(language, part) for part in parts if part.strip()]
    return found


DOCS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {"loopscope": shown(make_parser().epilog), **{name: shown(each.epilog) for name, each in verbs().items()}}
PAGES |= {page: snippets(page) for page in (README, *DOCS) if "/reference/" not in page}
# `test_public_names.py` has the reference of Python; the rest of the reference is the helps.
PAGES = {name: steps for name, steps in PAGES.items() if {language for language, _ in steps} & {"sh", "python"}}


def smaller(words: list[str], world: World) -> list[str]:
    """The same command for what is small: fewer steps, questions and rounds, and what random weights can guarantee."""
    words = [ALIAS.get(word, "cpu" if word == "cuda" else word) for word in words]
    of_a_model = any(word in MODELS or word.startswith(("rec", "LIVE")) for word in words)
    match words:
        case ["train", *_]:
            sizes = world.trained_custom if "model=my_model" in " ".join(words) else world.trained
            return [*words, *sizes, *(["--set", "training.bf16=false"] if "paper" in words else [])]
        case ["demo", *_]:
            return [*words, *world.trained]
        case ["pretrain", *_]:
            return words
        case ["study", verb, _, *_]:
            return words if verb in ("plan", "status") else ["study", "plan", *words[2:3]]
        case ["record", "task", *_, "--examples", _]:
            return [*words, "--examples", "100"]
        case ["record", "text", *_]:
            return [*words, "--context", "16"]
        case ["record", "live", *_]:
            return words if "--policy" in words else [*words, "--candidates", "3", *LAX]
        case ["record", "benchmark", *_]:
            return [*words, "--data", str(DATA), "--limit", "16"]
        case ["calibrate", *_] if of_a_model or "--per-difficulty" in words:
            return [*words, *LAX]
        case ["fit", *_] if "induction" not in words:
            return [*words, "--steps", "20"]
        case ["generate", *_]:
            return [*words, "--max-new-tokens", "3"]
        case ["harness", *_]:
            return [*words, "--limit", "4", *([] if "my_task.yaml" in words else ["--data", str(DATA)])]
        case ["bench", "generation", *_]:
            return [*words, "--rounds", "1", "--prompts", "2", "--prompt-tokens", "8", "--new-tokens", "4"]
        case ["bench", *_]:
            return [*words, "--rounds", "1"]
        case ["selfcheck", *_]:
            return [*words, "--rounds", "9"]
    return words


class Page:
    """Runs commands one after the other in the current folder."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.monkeypatch = world, monkeypatch
        self.calibrated: dict[str, str] = {}  # policy files, and what they were calibrated on

    def run(self, line: str) -> int:
        first, _, piped = line.rpartition(" | ")
        program, *words = (word for word in shlex.split(piped, comments=True) if not word.startswith("OMP_"))
        if program in NOT_HERE:
            return 0
        if program == "echo":
            return subprocess.run(line, shell=True).returncode
        if first:
            typed = io.TextIOWrapper(io.BytesIO(f"{shlex.split(first)[1]}\n".encode()))
            self.monkeypatch.setattr(sys, "stdin", typed)
        words = [found for word in words for found in self._expanded(word)]
        if program == "torchrun":
            return self._torchrun(words)
        assert program == "loopscope", line
        words = smaller(words, self.world)
        self._prepare(words)
        return main(words)

    def _expanded(self, word: str) -> list[str]:
        """As a shell does it."""
        if "*" not in word:
            return [word]
        for name in ("runs/demo",) if word.startswith("runs/demo") else ("runs/seed-0", "runs/seed-1"):
            self.world.supply(name)
        return sorted(map(str, Path().glob(word)))

    def _torchrun(self, words: list[str]) -> int:
        words[words.index("--nproc-per-node") + 1] = "2"
        words = [*words[:4], *smaller(words[4:], self.world)]
        return subprocess.run([sys.executable, "-m", "torch.distributed.run", *words]).returncode

    def _prepare(self, words: list[str]) -> None:
        """Supplies what the command takes; what it makes is not there yet."""
        out = words[words.index("--out") + 1] if "--out" in words else ""
        for word in words:
            if word != out:
                self.world.supply(word)
            if word == "my_task.yaml":
                self.world.supply("questions.jsonl")
            if word.startswith("my_model:"):
                self.world.supply("my_model.py")
        if words[:2] == ["record", "task"]:
            shutil.rmtree(Path(words[2], "recordings", words[words.index("--split") + 1]), ignore_errors=True)
        if words[0] == "calibrate":
            out = out or "policy.json"
            self.calibrated[out] = _model(words[1])
        elif "--policy" in words:
            self._supply_policy(words[words.index("--policy") + 1], words)
        if Path(out).is_dir() and out:
            shutil.rmtree(out)
        elif out:
            Path(out).unlink(missing_ok=True)

    def _supply_policy(self, file: str, words: list[str]) -> None:
        """One that fits the model of the command: by calibration on this page, else the demo's own, or one by hand."""
        path, model = Path(file), next(_model(word) for word in words if _model(word))
        if self.calibrated.get(file) == model or file.startswith("runs/"):
            return
        own = (
            Path(model, "policy.json")
            if model.startswith("runs/demo")
            else Path("runs/demo/fixed-geometric/policy.json")
        )
        if model in MODELS or model == "rec":
            ls.ExitPolicy("margin", 1.0).save(path)
        else:
            self.world.supply("runs/demo")
            shutil.copyfile(own, path)
        self.calibrated[file] = model

    def execute(self, code: str, names: dict[str, Any]) -> str:
        """What a block of Python prints."""
        if "import openai" in code or "from openai" in code:
            return ""  # it needs a server
        for word in re.findall(r'"([^"\n]+)"', code):
            self.world.supply(word)
        code = code.replace('"gsm8k"', '"my_task.yaml"')
        code = code.replace('ls.train("demo", ', f'ls.train("demo", overrides={self.world.trained[1::2]}, folder=')
        self.world.supply("my_task.yaml")
        with redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # such as a caution that the example has copies
            exec(compile(code, "snippet", "exec"), names)
        return printed.getvalue()


def _model(word: str) -> str:
    """The run or the language model that a path belongs to; nothing for other words."""
    if word in MODELS or word.startswith(("rec", "LIVE")):
        return "rec"
    if word.startswith("example:"):
        return word
    return word.partition("/recordings")[0] if word.startswith("runs/") and "." not in word else ""


def check(name: str, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    page, names, printed, settings = Page(world, monkeypatch), dict[str, Any](), "", ""
    for module, part in re.findall(r"\b(my_\w+):(\w+)", str(PAGES[name])):  # what the page tells to put there
        for language, text in PAGES[name]:
            if language == "python" and re.search(rf"^(?:def|class) {part}\b", text, re.MULTILINE):
                Path(f"{module}.py").write_text(text, encoding="utf-8")
    for language, text in PAGES[name]:
        if language == "sh":
            for file in re.findall(r"\bmy_\w+\.toml\b", text):
                Path(file).write_text(settings, encoding="utf-8")
            assert page.run(text) == 0, text
        elif language == "python":
            printed = page.execute(text, names)
        elif language == "toml":
            settings = text
        elif name == README:
            assert text.split() == printed.split()


@pytest.fixture(scope="module")
def shortly(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("shortly"), SHORTLY)


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("longer"), LONGER)


def check_monitors(world: World) -> None:
    """`test_inputs_that_are_counted_once_give_no_alarm` has what went wrong on the whole demo."""
    world.make("runs/demo")
    models = [policy.parent for policy in world.folder.glob("runs/demo/*/policy.json")]
    assert len(models) == 5
    for model in models:
        assert run("monitor", model, "--policy", model / "policy.json", "--audit", 0.1) == 0
        distinct = model.parent / f"{model.name}.json"
        distinct.unlink(missing_ok=True)
        assert run("calibrate", model, "--unseen", "--distinct", "--out", distinct) == 0
        assert run("monitor", model, "--policy", distinct) == 0


def test_no_monitor_of_a_model_of_the_demo_gives_an_alarm(shortly: World) -> None:
    check_monitors(shortly)


@pytest.mark.long
def test_no_monitor_gives_an_alarm_where_models_know_more(longer: World) -> None:
    check_monitors(longer)


@pytest.mark.parametrize("name", QUICK)
def test_examples_of_the_help_run(name: str, shortly: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, shortly, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_all_examples_run(name: str, longer: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, longer, tmp_path, monkeypatch)


def test_its_make_targets_exist() -> None:
    targets = set(re.findall(r"^make ([a-z-]+)", (ROOT / README).read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_readme_s_python_prints_what_it_says(
    tmp_path: Path, shortly: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PAGES, README, [step for step in PAGES[README] if step[0] != "sh"])
    check(README, shortly, tmp_path, monkeypatch)
