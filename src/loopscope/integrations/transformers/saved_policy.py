"""How is an exit policy saved with a model? As a file in its folder, which `generation_config.json` names, and as a
section of the model card with the policy's guarantee and its numbers.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
from transformers.utils import cached_file

from loopscope.analysis.diagnosis import Diagnosis
from loopscope.artifacts import loopscope_version
from loopscope.errors import UserError
from loopscope.files import read_text, write_bytes
from loopscope.models.checkpoint import weights_sha256
from loopscope.models.checkpoint_folder import GENERATION, POLICY, GenerationExits, no_named_policy
from loopscope.policy import ExitPolicy, Guarantee, PolicyFile

CARD = "README.md"
_BEGIN, _END = "<!-- loopscope: begins -->", "<!-- loopscope: ends -->"
_HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- loopscope
- looped-transformer
- adaptive-depth
---

# {name}
"""
_PLACES = ("cache_dir", "revision", "token", "local_files_only", "subfolder")
"""Arguments of `from_pretrained` that locate the files of a checkpoint."""
_LOST = {"gap": "is wrong where full depth is right", "disagreement": "differs from the answer of full depth"}


def fetch_saved_policy(source: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """The exit settings of a checkpoint's generation configuration, and the fetched file of its policy."""

    given = {key: options[key] for key in _PLACES if key in options}

    def fetched(name: str) -> Path | None:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **given)
        return None if found is None else Path(found)

    configuration = fetched(GENERATION)
    exits = GenerationExits() if configuration is None else GenerationExits.read(configuration)
    written = msgspec.to_builtins(exits)
    if exits.policy is None:
        return written, None
    policy = fetched(exits.policy)
    if policy is None:
        raise no_named_policy(exits.policy, source)
    gate = PolicyFile.read(policy).gate
    if gate is not None:  # the policy itself reports a missing gate
        fetched(str(PurePosixPath(exits.policy).with_name(PurePosixPath(gate.file).name)))
    return {**written, "policy": POLICY}, policy


def save_policy(policy: ExitPolicy, folder: Path) -> ExitPolicy:
    """Write the policy of a model into the folder of the saved model, tied to the files in this folder."""
    if policy.model is not None or policy.gate is not None:
        policy = policy.for_stored_weights(weights_sha256(folder))
    (folder / POLICY).parent.mkdir(exist_ok=True)
    policy.save(folder / POLICY)
    return policy


def write_card(folder: Path, model: Any, policy: ExitPolicy | None, diagnosis: Diagnosis | None) -> None:
    """Write a section into the model card, and leave the rest of the card unchanged.

    Without a policy and a diagnosis there is no section. If the card cannot be read or replaced, LoopScope warns you
    and leaves it unchanged: the model is saved.
    """
    try:
        _write_card(folder / CARD, model, policy, diagnosis)
    except UserError as error:
        warnings.warn(f"The model card has no section on exits. {error}", stacklevel=4)


def _write_card(card: Path, model: Any, policy: ExitPolicy | None, diagnosis: Diagnosis | None) -> None:
    """Replace LoopScope's section of a model card."""
    text = read_text(card, "model card") if card.exists() else ""
    ours = re.compile(rf"{re.escape(_BEGIN)}.*?{re.escape(_END)}\n?", re.DOTALL)
    if policy is None and diagnosis is None:
        if ours.search(text):
            write_bytes(card, ours.sub("", text).encode())
        return
    section = "\n".join((_BEGIN, *_card_section(model, policy, diagnosis), _END, ""))
    if ours.search(text):
        text = ours.sub(lambda _: section, text)
    else:
        text = (text or _HEAD.format(name=type(model).__name__)).rstrip() + f"\n\n{section}"
    write_bytes(card, text.encode())


def _card_section(model: Any, policy: ExitPolicy | None, diagnosis: Diagnosis | None) -> Iterator[str]:
    """The section of the model card about a looped model."""
    loops = model.num_loops
    yield f"## Adaptive depth\n\nA looped model: it applies the same layers up to {loops} times to every token.\n"
    yield "```python\nimport loopscope.integrations.transformers  # github.com/loopscope/loopscope, with [transformers]"
    yield "from transformers import AutoModelForCausalLM\n"
    yield "model = AutoModelForCausalLM.from_pretrained(...)  # this repository, or its folder"
    if policy is None:
        yield f"model.generate(..., num_loops={loops})\n```\n"
    else:
        yield f"model.generate(...)               # under the exit policy `{POLICY}`"
        yield "model.generate(..., policy=None)  # at full depth\n```\n"
        yield from _policy_lines(policy, loops)
    if diagnosis is not None:
        yield from _diagnosis_lines(diagnosis)
    yield f"Written by LoopScope {loopscope_version()}."


def _policy_lines(policy: ExitPolicy, loops: int) -> Iterator[str]:
    """The lines of the model card about an exit policy."""
    yield f"### Exit policy\n\nA token exits by the rule `{policy}`, with the KV cache `{policy.cache}`.\n"
    if policy.guarantee is None:
        yield "The rule was not calibrated: it comes without a guarantee.\n"
    else:
        yield f"**Guarantee.** {policy.guarantee.sentence}\n"
        yield "It is for texts like those of the calibration, in this precision, and for these weights alone.\n"
        yield from _card_table(dict(_guarantee_numbers(policy, policy.guarantee, loops)))
        yield ""


def _guarantee_numbers(policy: ExitPolicy, guarantee: Guarantee, loops: int) -> Iterator[tuple[str, str]]:
    """The numbers of a guarantee, for the model card."""
    low, high = guarantee.average_loops_interval
    yield "average loops, with 95 % interval", f"{guarantee.average_loops:.2f} of {loops} [{low:.2f}, {high:.2f}]"
    yield "an answer counts as lost if it", _LOST[guarantee.loss]
    for each in guarantee.evidence:
        where = "" if each.difficulty is None else f" at difficulty {each.difficulty:g}"
        yield f"lost when tested{where}", f"{100 * each.loss:.2f} % (allowed: {100 * guarantee.max_drop:g} %)"
        if each.p_value is not None:
            yield f"p-value of a loss above the limit{where}", f"{each.p_value:.2g}"
    tested = guarantee.tested
    sequences = "" if tested.sequences is None else f" of {tested.sequences:,} sequences"
    yield "tested examples", f"{tested.examples:,}{sequences} (recording {guarantee.recording[:12]})"
    if guarantee.full_depth_accuracy is not None:
        yield "right at full depth", f"{100 * guarantee.full_depth_accuracy:.1f} %"
    yield "readouts that were tested", ", ".join(guarantee.finalists)
    yield "precision", policy.scope.precision or "not known"
    yield "weights", (policy.model or "not known")[:12]


def _diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """The lines of the model card about a diagnosis."""
    yield "### Diagnosis\n"
    for sentence in filter(None, (diagnosis.sentence, diagnosis.target_sentence, diagnosis.room_sentence)):
        yield f"{sentence}\n"
    if diagnosis.table:
        head, *rows = diagnosis.table
        yield _card_row(head)
        yield _card_row("---" for _ in head)
        yield from map(_card_row, rows)
        yield ""


def _card_table(values: Mapping[str, str]) -> Iterator[str]:
    """A Markdown table for the model card."""
    yield "| | |\n| --- | --- |"
    yield from map(_card_row, values.items())


def _card_row(cells: Any) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"
