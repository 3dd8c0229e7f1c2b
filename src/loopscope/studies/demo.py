"""The demo: which part limits a fixed-prior and a learned-gate model, on a task small enough for any machine?"""

from pathlib import Path

from loopscope.errors import UserError
from loopscope.studies.local import Job
from loopscope.training.settings import read_settings

REFERENCE = "fixed-geometric"
MODELS = {
    REFERENCE: [],
    "fixed-uniform": ["objective.prior=uniform"],
    "linear-gate": ["objective.name=learned_gate", "model.gate=linear"],
    "mlp-gate": ["objective.name=learned_gate", "model.gate=mlp"],
}
"""Name -> what differs from the preset `demo`."""
TARGETS = (0.95, 0.98, 0.99)


def demo_jobs(folder: Path, overrides: list[str]) -> list[Job]:
    jobs = [Job(folder / name, read_settings("demo", [*changes, *overrides])) for name, changes in MODELS.items()]
    if any(job.settings.task.train_examples == 0 for job in jobs):
        raise UserError(
            "The demo counts unseen examples only, so it needs stored training examples (train_examples above 0)."
        )
    return jobs
