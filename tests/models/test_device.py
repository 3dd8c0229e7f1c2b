"""Is a device that is not there refused in a sentence?"""

import pytest
import torch

import loopscope as ls
from loopscope.models.device import check_device


def test_devices() -> None:
    assert check_device("cpu") == check_device(torch.device("cpu")) == torch.device("cpu")
    for name in ("foo", "meta", "cuda:99"):
        with pytest.raises(ls.UserError, match=f"'{name}' is not available"):
            check_device(name)
