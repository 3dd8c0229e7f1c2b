"""What do several seeds say together? Mean and sample standard deviation over those that reach the target."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class OverSeeds:
    mean: float | None  # None where no seed has a value
    deviation: float | None  # sample standard deviation; None with fewer than two values
    reached: int
    seeds: int

    def __str__(self) -> str:
        if self.mean is None:
            return "N/A"
        text = f"{self.mean:z.2f}" + ("" if self.deviation is None else f" ± {self.deviation:.2f}")
        return text if self.seeds == 1 else f"{text} ({self.reached} of {self.seeds})"


def over_seeds(values: Sequence[float | None]) -> OverSeeds:
    """Summarises one value a seed; None is a seed that does not reach it."""
    reached = [value for value in values if value is not None]
    return OverSeeds(
        mean=float(np.mean(reached)) if reached else None,
        deviation=float(np.std(reached, ddof=1)) if len(reached) > 1 else None,
        reached=len(reached),
        seeds=len(values),
    )
