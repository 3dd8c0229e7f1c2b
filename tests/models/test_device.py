"""Is a device that is not there refused in a sentence, and which one does `auto` take?"""

import pytest
import torch

import loopscope as ls
from loopscope.models.device import check_device
from loopscope.training.parallel import shared_device


def test_devices() -> None:
    assert check_device("cpu") == check_device(torch.device("cpu")) == torch.device("cpu")
    for name in ("foo", "meta", "cuda:99", "mps:99"):
        with pytest.raises(ls.UserError, match=f"'{name}' is not available"):
            check_device(name)


def test_auto_takes_the_first_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"cuda", "mps", "cpu"}

    def ones(_: int, device: torch.device) -> None:
        if device.type not in there:
            raise RuntimeError

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in there)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert check_device("auto") == torch.device("cuda:1")
    there.remove("cuda")
    assert check_device("auto") == torch.device("mps")
    there.remove("mps")
    assert check_device("auto") == torch.device("cpu")


def test_workers_share_cuda_or_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [shared_device(name) for name in ("auto", "mps")] == ["auto", "mps"]
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    for there, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert [shared_device(name) for name in ("auto", "cpu")] == [expected, "cpu"]
