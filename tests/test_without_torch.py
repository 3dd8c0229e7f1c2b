"""Does the core do its work where PyTorch is not installed, and does the rest say what to install?"""

import subprocess
import sys
from pathlib import Path

from loopscope.errors import install_command

SETUP = """
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotInstalled())
import numpy as np
import loopscope as ls

def made(split, seed):
    rng = np.random.default_rng(seed)
    labels, hard = rng.integers(0, 5, 800), rng.integers(1, 5, 800)
    logits = rng.normal(size=(800, 4, 5))
    for loop in range(4):
        logits[np.arange(800), loop, labels] += np.where(loop + 1 >= hard, 4.0, 0.0)
    return ls.Trajectory(logits=logits, labels=labels, split=split, gate_logits=rng.normal(size=(800, 4)))
"""
CORE = (
    SETUP
    + """
validation, test = made("validation", 1), made("test", 2)
assert ls.diagnose(validation, test).verdict == "readout"
assert ls.sweep("margin", validation, test).depth_at(0.9) > 1
assert ls.compare(validation, test, "gate", "margin").depth.sign == 1
policy = ls.calibrate(validation, 0.1)
policy.save("policy.json")
assert not ls.Monitor(ls.ExitPolicy.load("policy.json")).replay(test).alarm
ls.fit_stopper(made("train", 3), trees=32).save("stopper")
validation.save("recorded/validation")
test.save("recorded/test")
from loopscope.cli import main
for words in (
    "diagnose recorded", "sweep recorded --fitted stopper", "compare recorded gate margin",
    "monitor recorded --policy policy.json", "calibrate recorded --max-drop 0.1 --out again.json",
    "report recorded --out report",
):
    assert main(words.split()) == 0, words
assert "loopscope.models.looped_model" not in sys.modules
"""
)
NEEDED = (
    SETUP
    + """
from loopscope.errors import install_command
for name in ("load_model", "train", "generate", "record_model", "fit_gate", "run", "check_model"):
    try:
        getattr(ls, name)
    except ls.UserError as error:
        assert str(error) == f"loopscope.{name} needs torch; install it with: {install_command('torch')}.", error
    else:
        raise AssertionError(name)
from loopscope.cli import main
for words in ("train demo --out run", "demo --out demo", "study plan demo", "bench exits"):
    assert main(words.split()) == 2, words
"""
)


def run_python(code: str, folder: Path) -> str:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=300)
    assert found.returncode == 0, found.stderr
    return found.stderr


def test_recordings_are_diagnosed_certified_watched_and_reported(tmp_path: Path) -> None:
    run_python(CORE, tmp_path)
    assert (tmp_path / "report" / "report.html").is_file()


def test_what_needs_pytorch_says_what_installs_it(tmp_path: Path) -> None:
    said = run_python(NEEDED, tmp_path)
    assert said.count(install_command("torch")) == 4
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())
