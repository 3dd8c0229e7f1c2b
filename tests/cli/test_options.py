"""Do the names that the command line knows without PyTorch agree with the library's?"""

from typing import get_args

from loopscope.checks.model_contract import CHECK_KINDS
from loopscope.cli import options, selfcheck
from loopscope.engine.decoder import CACHE_MODES
from loopscope.models.checkpoint import DTYPES
from loopscope.scope import CacheMode


def test_names_are_those_of_the_library() -> None:
    assert tuple(DTYPES) == options.PRECISIONS
    assert get_args(CacheMode) == CACHE_MODES
    assert selfcheck.KINDS == CHECK_KINDS
