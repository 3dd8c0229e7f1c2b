"""How does a result become a data frame? It names its columns, which every library of data frames accepts."""

from abc import ABC, abstractmethod
from typing import Any

from loopscope.errors import UserError


class Tabular(ABC):
    """Let a result be a data frame, too: its columns for any library of data frames."""

    @abstractmethod
    def to_dict(self) -> dict[str, list[Any]]:
        """List the columns by name; `pandas.DataFrame` and `polars.DataFrame` take them as they are.

        Returns
        -------
        dict[str, list]
            The values of every column; all columns have the same length.
        """

    def to_pandas(self) -> Any:
        """Make a data frame of the columns.

        Returns
        -------
        pandas.DataFrame
            The table of `to_dict`.

        Raises
        ------
        UserError
            If pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError:
            raise UserError("to_pandas() needs pandas; install it, or take the columns as to_dict().") from None
        return pandas.DataFrame(self.to_dict())
