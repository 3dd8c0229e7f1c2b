"""What becomes of a study when one of its steps has not enough memory?"""

from pathlib import Path

import pytest
import torch

import loopscope as ls
from loopscope.studies.step_runner import Failures, do_step
from loopscope.studies.steps import Step


class Huge(Step, frozen=True):
    kind = "huge"

    def run(self, store: Path, device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")


class Wrong(Step, frozen=True):
    kind = "wrong"

    def run(self, store: Path, device: torch.device) -> None:
        raise RuntimeError("a bug")


def test_a_step_without_room_fails_alone(tmp_path: Path) -> None:
    step, failures = Huge(), Failures()
    with pytest.raises(ls.UserError, match="not enough memory for it on cpu") as failed:
        do_step(step, tmp_path, "cpu")
    failures.look_at(step, failed.value)  # noted, not raised: others go on
    with pytest.raises(ls.UserError, match="One step of the study failed"):
        failures.check()
    with pytest.raises(RuntimeError, match="a bug"):
        do_step(Wrong(), tmp_path, "cpu")
