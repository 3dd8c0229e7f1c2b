"""What does a reader see? Tables, figures and the page of any analysis; `loopscope.report(...)` writes all of them.

The room is called like the function, and importing any of its files makes it an attribute of `loopscope`; so the module
itself can be called.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loopscope.analysis import Target
    from loopscope.exits import ExitPolicy
    from loopscope.trajectory import Trajectory


class _Report(ModuleType):
    def __call__(
        self,
        models: "Mapping[str, tuple[Trajectory, Trajectory]]",
        out: str | Path,
        reference: str | None = None,
        targets: "Sequence[float | Target] | None" = None,
        policies: "Mapping[str, Sequence[ExitPolicy]] | None" = None,
        style: str = "page",
    ) -> Path:
        """See `loopscope.report.write.report`."""
        from loopscope.errors import UserError

        try:
            from loopscope.report.write import report
        except ImportError as error:
            needed = f"The report needs {error.name}; install it with: pip install 'loopscope[report]'."
            raise UserError(needed) from None
        return report(models, out, reference, targets, policies, style)


sys.modules[__name__].__class__ = _Report
