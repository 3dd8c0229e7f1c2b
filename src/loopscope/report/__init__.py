"""What does a reader see? Tables, figures and the page of any analysis; `loopscope.report(...)` writes all of them.

The room is called like the function, and importing any of its files makes it an attribute of `loopscope`; so the module
itself can be called.
"""

import sys
from types import ModuleType
from typing import Any

from loopscope.errors import missing_extra


class _Report(ModuleType):
    """Make `loopscope.report` callable: `loopscope.report(...)` writes a report."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """See `loopscope.report.write.report`."""
        try:
            from loopscope.report.write import report
        except ModuleNotFoundError as error:
            raise missing_extra(error, "loopscope.report") from None
        return report(*arguments, **options)


sys.modules[__name__].__class__ = _Report
