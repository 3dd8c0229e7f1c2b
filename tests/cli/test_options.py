"""Do the names that the command line knows without the library agree with the library's?"""

from loopscope.checks.check import CHECK_KINDS
from loopscope.cli import options
from loopscope.engine.decoder import CACHE_MODES
from loopscope.exits.guarantee import BOUNDS
from loopscope.models.checkpoint import _BUILDERS, DTYPES
from loopscope.models.configuration import LOOPED


def test_names_are_those_of_the_library() -> None:
    assert tuple(DTYPES) == options.PRECISIONS
    assert options.CACHE_MODES == CACHE_MODES
    assert options.CHECK_KINDS == CHECK_KINDS
    assert options.BOUNDS == BOUNDS
    assert tuple(_BUILDERS) == LOOPED
