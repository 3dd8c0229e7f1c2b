"""Which benchmarks are there? The paper's six, with its shots, splits and metrics; lm_eval defines all the rest.

What a question looks like, how few-shot examples are drawn and how answers are judged is in lm_eval's task definitions,
which are named here and not copied.
"""

from typing import Literal

import msgspec

from loopscope.arguments import as_count
from loopscope.config import Settings
from loopscope.errors import UserError, did_you_mean

Metric = Literal["acc", "acc_norm"]
Split = Literal["train", "validation", "test"]

# fmt: off
MMLU_SUBJECTS = (
    "abstract_algebra", "anatomy", "astronomy", "business_ethics", "clinical_knowledge", "college_biology",
    "college_chemistry", "college_computer_science", "college_mathematics", "college_medicine", "college_physics",
    "computer_security", "conceptual_physics", "econometrics", "electrical_engineering", "elementary_mathematics",
    "formal_logic", "global_facts", "high_school_biology", "high_school_chemistry", "high_school_computer_science",
    "high_school_european_history", "high_school_geography", "high_school_government_and_politics",
    "high_school_macroeconomics", "high_school_mathematics", "high_school_microeconomics", "high_school_physics",
    "high_school_psychology", "high_school_statistics", "high_school_us_history", "high_school_world_history",
    "human_aging", "human_sexuality", "international_law", "jurisprudence", "logical_fallacies", "machine_learning",
    "management", "marketing", "medical_genetics", "miscellaneous", "moral_disputes", "moral_scenarios", "nutrition",
    "philosophy", "prehistory", "professional_accounting", "professional_law", "professional_medicine",
    "professional_psychology", "public_relations", "security_studies", "sociology", "us_foreign_policy", "virology",
    "world_religions",
)
# fmt: on


class Benchmark(Settings, frozen=True):
    """One benchmark as the paper runs it."""

    name: str
    title: str  # as the paper writes it
    shots: int
    metric: Metric  # the one that is scored; the other one is reported too
    definitions: str  # the folder of lm_eval's task definitions
    subjects: tuple[str, ...] = ()  # each is an lm_eval task of its own
    pool: str = "train"  # where few-shot examples come from; lm_eval opens it even where none is drawn
    validation_share: float | None = None  # of the validation split, where the test split's labels are not public
    most_choices: int = 4  # of its questions

    @property
    def has_training(self) -> bool:
        """Whether there are questions to fit a gate on that are in no prompt."""
        return self.pool == "train"

    @property
    def tasks(self) -> tuple[str, ...]:
        """lm_eval's names of it."""
        return tuple(f"{self.name}_{subject}" for subject in self.subjects) or (self.name,)

    def dataset_split(self, split: Split) -> str:
        """The split of the data set that holds the questions of `split`."""
        if split == "train":
            if not self.has_training:
                raise UserError(f"{self.title} has no training questions: its {self.pool} split is in every prompt.")
            return split
        return split if self.validation_share is None else "validation"


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            name="mmlu",
            title="MMLU",
            shots=5,
            metric="acc",
            definitions="mmlu/default",
            subjects=MMLU_SUBJECTS,
            pool="dev",
        ),
        Benchmark(name="arc_easy", title="ARC-Easy", shots=8, metric="acc_norm", definitions="arc", most_choices=5),
        Benchmark(
            name="arc_challenge", title="ARC-Challenge", shots=25, metric="acc_norm", definitions="arc", most_choices=5
        ),
        Benchmark(name="openbookqa", title="OpenBookQA", shots=0, metric="acc_norm", definitions="openbookqa"),
        Benchmark(
            name="hellaswag",
            title="HellaSwag",
            shots=10,
            metric="acc_norm",
            definitions="hellaswag",
            validation_share=0.2,
        ),
        Benchmark(
            name="commonsense_qa",
            title="CommonsenseQA",
            shots=10,
            metric="acc",
            definitions="commonsense_qa",
            validation_share=0.2,
            most_choices=5,
        ),
    )
}


def benchmark_named(name: str, shots: int | None = None) -> Benchmark:
    """With so many few-shot examples in place of the paper's."""
    if not isinstance(name, str) or name not in BENCHMARKS:
        hint = did_you_mean(str(name), BENCHMARKS)
        raise UserError(f"There is no benchmark '{name}'{hint}; choose one of {', '.join(BENCHMARKS)}.")
    found = BENCHMARKS[name]
    return found if shots is None else msgspec.structs.replace(found, shots=as_count(shots, "shots", 0))
