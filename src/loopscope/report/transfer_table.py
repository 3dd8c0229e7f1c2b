"""What does a rule of one model do on another? A row a rule, over all pairs of models that differ in seeds only."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from loopscope.analysis.results import over_seeds
from loopscope.analysis.schema import Results
from loopscope.analysis.targets import percent_text
from loopscope.analysis.transfer import TransferResult
from loopscope.analysis.verdict_text import with_bounds
from loopscope.readouts.signals import FITTED, OWN_GATES
from loopscope.report.tables import NOTHING, Table, gap_over_seeds, of_sequences

_ITSELF, _OTHER_SEED = "itself", "another seed"


def transfer_table(results: Results) -> Table:
    """Rules of every model on every other, its own data first of all as the measure."""
    order = {model.name: place for place, model in enumerate(results.models)}
    group_of = {name: group.label for group in results.groups for name in group.names}
    alone = {name: len(group.names) == 1 for group in results.groups for name in group.names}
    labels = {model.name: group_of[model.name] for model in results.models}
    pairs: dict[tuple[str, str, str], list[TransferResult]] = defaultdict(list)
    for each in sorted(results.transfer, key=lambda each: order[each.fitted_on]):
        stops = labels[each.stops]
        if each.fitted_on == each.stops:
            stops = _ITSELF
        elif labels[each.fitted_on] == stops and not alone[each.stops]:
            stops = _OTHER_SEED
        pairs[labels[each.fitted_on], stops, _kind(each.readout)].append(each)
    rows = [
        [fitted_on, stops, _rule(kind, found), *cells]
        for (fitted_on, stops, kind), found in pairs.items()
        for cells in _cells(found)
    ]
    target = results.targets[0]
    note = (
        "Rules that were fitted on one model, replayed on the test data of another: the threshold of its best readout "
        "without a gate and of its own gate, its fitted gates, and stoppers learned from all of its signals but the "
        "gate's. The best readout is that of the model that is stopped, as its validation data choose it. "
        f"{target.label}: how many loops more the rule takes than that readout, with thresholds as they lie in the "
        "validation data of the model that is stopped, so that only what the rule says is carried over. At the rule's "
        "own threshold: how many points more it is right in, and how many loops more it takes, than that readout at "
        "the threshold with which it reaches the target on its own validation data. One pair of models: with its 95 % "
        "interval. Several: mean ± sample standard deviation (how many), and in how many the interval lies on the "
        "worse side of zero. A gate for states of another model need not mean anything there; this says whether it "
        "does."
    )
    columns = ["fitted on", "stops", "rule", f"{target.label} - best readout's", "own threshold: points", "loops"]
    return Table("Rules across trajectories", note + of_sequences(results), columns, rows)


def _kind(readout: str) -> str:
    """Which rule of a model it is, where its best signal may be another in every seed."""
    return readout if readout in OWN_GATES or readout.startswith(FITTED) else ""


def _rule(kind: str, found: Sequence[TransferResult]) -> str:
    return kind or "/".join(dict.fromkeys(each.readout for each in found))


def _cells(found: Sequence[TransferResult]) -> Iterator[list[str]]:
    """What was found of a rule, and why it could not be replayed where it could not."""
    refused = dict.fromkeys(each.refused for each in found if each.refused)
    yield from ([f"rejected: {sentence}", NOTHING, NOTHING] for sentence in refused)
    known = [each.selected for each in found if each.selected is not None]
    if not known:
        return
    gaps = [each.gap for each in found if each.selected is not None]
    if len(known) == 1:
        (gap,), (one,) = gaps, known
        at = "" if gap is None or gap.accuracy == gap.target else f" @{percent_text(gap.accuracy)}"
        yield [
            NOTHING if gap is None else with_bounds(gap) + at,
            with_bounds(one.accuracy, 100),
            with_bounds(one.loops),
        ]
        return
    worse = sum(gap is not None and gap.sign > 0 for gap in gaps)
    wrong, slower = sum(each.accuracy.high < 0 for each in known), sum(each.loops.low > 0 for each in known)
    yield [
        f"{gap_over_seeds(gaps) or NOTHING}; worse in {worse}",
        f"{over_seeds([100 * each.accuracy.value for each in known])}; worse in {wrong}",
        f"{over_seeds([each.loops.value for each in known])}; worse in {slower}",
    ]
