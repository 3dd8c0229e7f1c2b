"""Does a model do on this machine what it promises? Six kinds of checks.

- contract: shapes, order, neighbours and loops do not matter where they must not;
- precision: what low precision says at every loop, against float32;
- batch: rows of different lengths together, against each alone;
- cache: text token by token with remembered keys and values, against one plain forward pass over it;
- replay: exit policies live, in generation and in the engine, against their replay on what a plain pass says;
- speed: fixed depths against full depth, one after the other in every round.

Models are loaded one after the other, and of each only what it said is kept.
"""

from collections.abc import Callable, Sequence

import msgspec

from loopscope.checks.check import CHECK_KINDS, Check, CheckKind
from loopscope.checks.contract import contract_checks
from loopscope.checks.machine import MACHINE_CHECKS, precision_checks
from loopscope.checks.sample import Array, PlainOutputs, TokenSample
from loopscope.errors import UserError
from loopscope.models import LoopedModel
from loopscope.progress import ProgressCallback, silent

Load = Callable[[str], LoopedModel]
LOW = ("bfloat16", "float16")


class SelfCheck(msgspec.Struct, frozen=True):
    model: str
    dtype: str
    device: str
    num_loops: int
    tokens: str  # where they come from
    checks: list[Check]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]

    @property
    def sentence(self) -> str:
        """What all checks say together."""
        judged = sum(check.passed is not None for check in self.checks)
        if not judged:
            return "Nothing of this has a limit: it is shown, not judged."
        verdict = f"{len(self.failed)} of {judged:,} checks failed" if self.failed else f"All {judged:,} checks passed"
        shown = len(self.checks) - judged
        return verdict + (f"; {shown:,} more have no limit and are shown only." if shown else ".")


def selfcheck(
    name: str,
    load: Load,
    text: Array | None = None,
    *,
    dtype: str = "float32",
    kinds: Sequence[CheckKind] = CHECK_KINDS,
    rounds: int = 3,
    seed: int = 0,
    source: str = "the text",
    progress: ProgressCallback = silent,
) -> SelfCheck:
    """`load(precision)` gives the model; `text` its tokens, which come from `source`; without any they are random.

    All kinds but precision are checked in `dtype`; of precision, only `dtype` is judged, and the others are shown.
    """
    checks: list[Check] = []
    reference: PlainOutputs | None = None
    sample: TokenSample | None = None
    others = [kind for kind in kinds if kind != "precision"]
    precisions = ["float32", *LOW] if "precision" in kinds else []
    stages = len(precisions) + len(others)
    depth, device = 0, ""
    for precision in dict.fromkeys([*precisions, *([dtype] if others else [])]):
        model = load(precision)
        sample = sample or TokenSample.of(model, text, seed)
        depth, device = model.num_loops, str(next(model.parameters()).device)
        if precision in precisions:
            try:
                outputs = sample.read(model)
            except RuntimeError as error:
                if precision == "float32":
                    raise
                reason = str(error).splitlines()[0]
                checks.append(Check("precision", precision, None, "", None, None, f"not available here: {reason}"))
                outputs = None
            if reference is None:
                reference = outputs
            elif outputs is not None:
                checks += precision_checks(precision, reference, outputs, judged=precision == dtype)
            progress(precisions.index(precision) + 1, stages, precision)
        if precision == dtype:
            for kind in others:
                if kind == "contract":
                    checks += _contract(model)
                elif model.causal or kind == "batch":
                    checks += MACHINE_CHECKS[kind](model, sample, dtype, rounds)
                else:
                    checks.append(Check(kind, "not checked", None, "", None, None, "the model looks ahead"))
                progress(len(precisions) + others.index(kind) + 1, stages, kind)
        del model
    checks.sort(key=lambda check: CHECK_KINDS.index(check.kind))
    return SelfCheck(name, dtype, device, depth, "random tokens" if text is None else source, checks)


def _contract(model: LoopedModel) -> list[Check]:
    """What holds, up to the first that does not."""
    checks: list[Check] = []
    try:
        checks.extend(contract_checks(model))
    except UserError as error:
        checks.append(Check("contract", "the model contract", None, "", None, False, str(error)))
    return checks
