"""Prints the numbers with which docs/evidence/claims.md judges the paper's claims, from the study's results.json.

python scripts/claims.py [runs/mano/report/results.json | docs/evidence/results.json.xz]

Of another study of MANO, such as `mano-mod3`, it prints what needs no run that only `mano` has.
"""

import json
import lzma
import math
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

Model = dict[str, Any]
TARGETS: list[str] = []  # those of the results
CONFIDENCE = ("entropy", "top1", "margin")
CONVERGENCE = ("kl", "logit_change", "hidden_change")
PRIORS = ("geometric0.3", "uniform")


def over_seeds(values: Sequence[float | None], digits: int = 2) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "N/A"
    text = f"{statistics.mean(known):z.{digits}f}"
    if len(known) > 1:
        text += f" ± {statistics.stdev(known):.{digits}f}"
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)})"


def gap(value: dict[str, Any] | None) -> str:
    if value is None:
        return "none"
    at = "" if value["accuracy"] == value["target"] else f" at {value['accuracy']:.2f}"
    return f"{value['value']:+.2f} [{value['low']:+.2f}, {value['high']:+.2f}]{at}"


def sign(value: dict[str, Any]) -> int:
    return 0 if value["low"] <= 0 <= value["high"] else 1 if value["value"] > 0 else -1


def frontier(model: Model, readout: str, grid: str = "paper") -> dict[str, Any] | None:
    frontiers = model["paper_grid"]["frontiers"] if grid == "paper" and model["paper_grid"] else model["frontiers"]
    return next((each for each in frontiers if each["readout"] == readout), None)


def depth(model: Model, readout: str, target: str = "0.95", grid: str = "paper") -> float | None:
    found = frontier(model, readout, grid)
    return None if found is None else found["depth_at"][target]


def depths(models: list[Model], readout: str, grid: str = "paper") -> str:
    return " | ".join(over_seeds([depth(model, readout, target, grid) for model in models]) for target in TARGETS)


def best_at(model: Model, target: str) -> tuple[str, float | None]:
    """The single readout that validation data choose for a target, and its depth there on test data."""
    room = model["rooms"][target]["room_left"] if target in model["rooms"] else None
    chosen = model["diagnosis"]["best_readout"] if room is None else room["first"]
    return chosen, depth(model, chosen, target, "fine")


def shared(model: Model, reference: Model, target: str = "0.95") -> str:
    """The trajectory gap by the readouts of both, as far as the depths of results tell it."""
    names = {each["readout"] for each in model["frontiers"]} & {each["readout"] for each in reference["frontiers"]}
    names = {name for name in names if name != "oracle" and not name.startswith(("gate", "stopper"))}
    sides = []
    for side in (model, reference):
        found = [each for each in side["frontiers"] if each["readout"] in names]
        known = [each for each in found if each["calibration_depth_at"][target] is not None]
        if not known:
            return f"{side['name']} does not reach it on validation data"
        best = min(known, key=lambda each: each["calibration_depth_at"][target])
        depth, interval = best["depth_at"][target], best["depth_interval"][target]
        if depth is None or interval is None or interval["reached"] < 0.95:
            return f"{side['name']} does not reach it surely on test data"
        sides.append((best["readout"], depth, interval["low"], interval["high"]))
    (ours, a, a_low, a_high), (theirs, b, b_low, b_high) = sides
    low, high = -math.hypot(a - a_low, b_high - b), math.hypot(a_high - a, b - b_low)
    if model["forced_accuracy"] == reference["forced_accuracy"]:
        low = high = 0.0  # the same trajectory: nothing was drawn apart
    return f"{a - b:+.2f} [{a - b + low:+.2f}, {a - b + high:+.2f}] ({ours} - {theirs})"


def title(text: str) -> None:
    print(f"\n## {text}\n")


class Claims:
    def __init__(self, results: dict[str, Any]) -> None:
        self.models: list[Model] = results["models"]
        self.groups: dict[str, list[Model]] = {}
        for model in self.models:
            self.groups.setdefault(model["name"].rsplit("-s", 1)[0], []).append(model)

    def task(self, task: str) -> dict[str, list[Model]]:
        return {name: models for name, models in self.groups.items() if name.startswith(f"{task}-")}

    def blame(self, task: str) -> None:
        title(f"{task}: own gate and best readout, D@X at every target (fine grid), gaps by seed at the first")
        for name, models in self.task(task).items():
            print(f"- {name}: blamed {[model['diagnosis']['verdict'] for model in models]}")
            print(f"  - own gate {depths(models, 'gate', 'fine')} (paper's grid {depths(models, 'gate')})")
            chosen = [[best_at(model, target) for model in models] for target in TARGETS]
            names = ["/".join(dict.fromkeys(each[0] for each in at)) for at in chosen]
            own = " | ".join(over_seeds([each[1] for each in at]) for at in chosen)
            print(f"  - best readout, chosen on validation data for each target ({', '.join(names)}): {own}")
            print(f"  - margin {depths(models, 'margin', 'fine')} (paper's grid {depths(models, 'margin')})")
            for kind in ("readout_gap", "trajectory_gap"):
                print(f"  - {kind}: {'; '.join(gap(model['diagnosis'][kind]) for model in models)}")

    def like_with_like(self, task: str) -> None:
        """Results of version 0.2 let a gate be the best readout of a trajectory; their depths allow to leave it out."""
        title(f"{task}: trajectory gap at 95 %, by the readouts that both have, without gates (fine grid)")
        print("Ends of an interval: both depths' own, combined as if drawn apart, so rather too wide.")
        measures = [model for model in self.models if model["is_reference"] and model["name"].startswith(f"{task}-")]
        references = {model["name"].rsplit("-s", 1)[1]: model for model in measures}
        for models in self.task(task).values():
            for model in models:
                reference = references[model["name"].rsplit("-s", 1)[1]]
                if model is not reference:
                    before = gap(model["diagnosis"]["trajectory_gap"])
                    print(f"- {model['name']}: {before} -> {shared(model, reference)}")

    def forced(self, task: str) -> None:
        title(f"{task}: accuracy of every loop, best loop, mean over seeds")
        for name, models in self.task(task).items():
            loops = zip(*(model["forced_accuracy"] for model in models), strict=True)
            best = over_seeds([100 * max(model["forced_accuracy"]) for model in models], 1)
            print(f"- {name}: {', '.join(f'{100 * statistics.mean(loop):.1f}' for loop in loops)}; best {best}")

    def confidence(self, task: str) -> None:
        title(f"{task}: readouts of the fixed priors on the paper's grid, D@95 D@98 D@99; seed 0 with its interval")
        for prior in PRIORS:
            models = self.groups[f"{task}-{prior}-fixed"]
            for readout in ("fixed", *CONFIDENCE, *CONVERGENCE):
                found = frontier(models[0], readout)
                interval = found["depth_interval"]["0.95"] if found else None
                seed0 = f"[{interval['low']:.2f}, {interval['high']:.2f}]" if interval and interval["low"] else "none"
                print(f"- {prior}, {readout}: {depths(models, readout)}; seed 0 {depth(models[0], readout)} {seed0}")
                selected = [each["selected"] for model in models if (each := frontier(model, readout))]
                print(
                    f"  - selected: accuracy {over_seeds([100 * each['accuracy'] for each in selected], 1)}, "
                    f"loops {over_seeds([each['average_loops'] for each in selected])}"
                )

    def ordering(self, task: str) -> None:
        title(f"{task}: difficulty ordering (bin means; single examples)")
        for prior in PRIORS:
            models = self.groups[f"{task}-{prior}-fixed"]
            for signal in models[0]["ordering"]:
                means, single = (
                    over_seeds([model["ordering"][signal][kind] for model in models])
                    for kind in ("bin_mean", "per_example")
                )
                print(f"- {prior}, {signal}: {means}; {single}")
            for signal in ("entropy", "margin", "kl", "hidden_change"):
                table = models[0]["signals"][signal]
                rows = [", ".join("-" if value is None else f"{value:.2f}" for value in row) for row in table["values"]]
                print(f"  - {signal} by loop, seed 0, easiest {rows[0]}; hardest {rows[-1]}")

    def extrapolation(self) -> None:
        title("beyond the range of training: correlation of bin means over the harder levels, averaged over loops")
        for prior in PRIORS:
            models = self.groups[f"mano-{prior}-fixed"]
            accuracy = models[0]["extrapolation"]["forced_accuracy_by_difficulty"]
            print(f"- {prior}: last loop by level {[round(100 * row[-1], 1) for row in accuracy['values']]} (seed 0)")
            for signal in ("entropy", "margin", "kl", "hidden_change"):
                sign = -1.0 if signal in ("top1", "margin") else 1.0
                found: list[float | None] = []
                for model in models:
                    table = model["extrapolation"]["signals"][signal]
                    loops = [loop for loop in zip(*table["values"], strict=True) if None not in loop]
                    correlations = [spearmanr(table["levels"], loop).statistic for loop in loops]
                    found.append(sign * statistics.mean(correlations))
                print(f"  - {signal}: {over_seeds(found)} ({', '.join(f'{value:.2f}' for value in found)})")

    def by_difficulty(self, task: str) -> None:
        title(f"{task}: fixed minus gate by difficulty, points, mean over seeds; last loop of the hardest")
        for prior in PRIORS:
            fixed = self.groups[f"{task}-{prior}-fixed"]
            for gate in ("linear-b0.1", "mlp-b0.1", "decoupled-linear-b0.1", "decoupled-mlp-b0.1"):
                models = self.groups[f"{task}-{prior}-{gate}"]
                for loop in (0, 1, 2):
                    gains = [
                        100
                        * statistics.mean(
                            a["forced_accuracy_by_difficulty"]["values"][level][loop]
                            - b["forced_accuracy_by_difficulty"]["values"][level][loop]
                            for a, b in zip(fixed, models, strict=True)
                        )
                        for level in range(len(fixed[0]["forced_accuracy_by_difficulty"]["levels"]))
                    ]
                    print(f"- {prior}, {gate}, loop {loop + 1}: {', '.join(f'{gain:+.1f}' for gain in gains)}")
                last = [100 * model["forced_accuracy_by_difficulty"]["values"][-1][-1] for model in models]
                same = [100 * model["forced_accuracy_by_difficulty"]["values"][-1][-1] for model in fixed]
                print(f"  - hardest at the last loop: {over_seeds(last, 1)} against {over_seeds(same, 1)} (fixed)")
                mass = models[0]["exit_distribution"]
                if mass is not None:
                    for name, row in (("easiest", mass["values"][0]), ("hardest", mass["values"][-1])):
                        print(f"  - exits, {name}, seed 0: {', '.join(f'{100 * value:.0f}' for value in row)} %")

    def early_states(self) -> None:
        title("accuracy at loop 1 against D@95 of the best readout, Spearman's correlation over MANO's trajectories")
        runs = [
            (model["forced_accuracy"][0], best_at(model, "0.95")[1], name)
            for name, models in self.task("mano").items()
            for model in models
            if "decoupled" not in name  # whose trajectories are those of the fixed priors
        ]
        for label, chosen in (("all", runs), ("with a gate", [run for run in runs if "-b0" in run[2]])):
            known = [(first, depth) for first, depth, _ in chosen if depth is not None]
            rho = spearmanr([first for first, _ in known], [depth for _, depth in known]).statistic
            print(f"- {label}: {rho:+.2f} over {len(known)} of {len(chosen)} runs")

    def fitted(self, task: str) -> None:
        title(f"{task}: fitted gates, D@X at every target; and minus own gate or margin at the first, paired, by seed")
        signs: dict[tuple[str, str], list[int]] = {}
        for name, models in self.task(task).items():
            gaps = [{each["first"]: each for each in model["fitted_gaps"]} for model in models]
            for readout in sorted({readout for each in gaps for readout in each}):
                print(
                    f"- {name}, {readout}: {depths(models, readout, 'fine')} (paper's grid {depths(models, readout)})"
                )
                found = [each.get(readout) for each in gaps]
                print(f"  - minus {gaps[0][readout]['second']}: {'; '.join(gap(each) for each in found)}")
                kind = "fixed prior" if "-fixed" in name else "learned gate"
                signs.setdefault((kind, readout), []).extend(sign(each) for each in found if each is not None)
        for (kind, readout), each in signs.items():
            print(f"- {kind}, {readout}: better {each.count(-1)}, undecided {each.count(0)}, worse {each.count(1)}")

    def remedy(self, task: str) -> None:
        title(f"{task}: the remedy, D@95 | D@98 | D@99 on the fine grid (reached by how many seeds)")
        for prior in PRIORS:
            fixed = self.groups[f"{task}-{prior}-fixed"]
            print(f"- {prior}, fixed prior, margin: {depths(fixed, 'margin', 'fine')}")
            for kind in ("linear", "mlp"):
                joint = self.groups[f"{task}-{prior}-{kind}-b0.1"]
                decoupled = self.groups[f"{task}-{prior}-decoupled-{kind}-b0.1"]
                print(f"- {prior}, {kind}, joint: {depths(joint, 'gate', 'fine')}")
                fitted = f"gate:{kind}-ponder"
                missing = "" if frontier(fixed[0], fitted, "fine") else "not fitted: "
                print(f"- {prior}, {kind}, fitted: {missing}{depths(fixed, fitted, 'fine')}")
                print(f"- {prior}, {kind}, decoupled: {depths(decoupled, 'gate', 'fine')}")
                print(f"- {prior}, {kind}, decoupled, margin: {depths(decoupled, 'margin', 'fine')}")
                for label, models in (("joint", joint), ("decoupled", decoupled)):
                    selected = [each["selected"] for model in models if (each := frontier(model, "gate", "fine"))]
                    print(
                        f"  - {label} at the selected point: "
                        f"{over_seeds([100 * each['accuracy'] for each in selected], 1)} % at "
                        f"{over_seeds([each['average_loops'] for each in selected])} loops"
                    )

    def stoppers(self) -> None:
        title("learned stoppers: reachable room of the room left, at every target that is reached; by seed")
        for name, models in self.groups.items():
            for target in TARGETS:
                both = [(each["room_left"], each["reachable_room"]) for m in models if (each := m["rooms"].get(target))]
                known = [pair for pair in both if all(each and each["accuracy"] == each["target"] for each in pair)]
                room, reachable = ([pair[place]["value"] for pair in known] for place in (0, 1))
                gains = [sign(pair[1]) for pair in known]
                print(
                    f"- {name}, {target}: {over_seeds(reachable)} of {over_seeds(room)} ({len(known)} seeds; better "
                    f"{gains.count(1)}, worse {gains.count(-1)}): {'; '.join(gap(pair[1]) for pair in known)}"
                )
            for stopper in ("stopper:induction", "stopper:classifier"):
                print(f"  - {stopper}: {depths(models, stopper, 'fine')}")

    def certified(self) -> None:
        title("certified policies")
        verdicts: dict[str, int] = {}
        for name, models in self.groups.items():
            kept = [policy for model in models for policy in model["certified"]]
            for policy in kept:
                verdict = policy["held_out"]["guarantee"]["verdict"]
                verdicts[verdict] = verdicts.get(verdict, 0) + 1
            loops = over_seeds([policy["held_out"]["average_loops"]["value"] for policy in kept])
            risks = [max(risk["loss"] for risk in policy["held_out"]["guarantee"]["risks"]) for policy in kept]
            lost = ", ".join(f"{100 * risk:.2f}" for risk in risks)
            refused = sum(len(model["refused"]) for model in models)
            print(f"- {name}: {loops} loops, loses {lost} %, {[p['readout'] for p in kept]}, refused {refused}")
        print(f"- verdicts: {verdicts}")

    def jointly(self, task: str) -> list[Model]:
        """The runs whose gate shaped its trajectory."""
        names = [name for name in self.task(task) if "-b0" in name and "decoupled" not in name]
        return [model for name in names for model in self.groups[name]]

    def utility_and_ponder(self, task: str) -> None:
        title(f"{task}: marginal-utility gates minus ponder gates, fitted to the same trajectory (5.4)")
        fits = [
            (model, f"gate:{kind}-utility", f"gate:{kind}-ponder")
            for models in self.task(task).values()
            for model in models
            for kind in ("linear", "mlp")
            if frontier(model, f"gate:{kind}-utility")
        ]
        if not fits:
            return
        earlier, never_later, later_at, selected = 0, 0, set[float](), list[int]()
        for model, *both in fits:
            utility, ponder = (frontier(model, readout) or {} for readout in both)
            pairs = zip(utility["average_loops"], ponder["average_loops"], strict=True)
            more = [ours - theirs for ours, theirs in pairs]
            earlier += statistics.mean(more) < 0
            never_later += max(more) <= 0
            later_at |= {at for at, each in zip(utility["thresholds"], more, strict=True) if each > 0}
            loops = [found["selected"]["average_loops"] for found in (utility, ponder)]
            selected.append((loops[0] > loops[1]) - (loops[0] < loops[1]))
        at = ", ".join(f"{threshold:g}" for threshold in sorted(later_at)) or "none"
        print(
            f"- at equal thresholds (the mean over the grid of 100) utility exits earlier in {earlier} of {len(fits)}"
        )
        print(
            f"- at every single threshold no later in {never_later} of {len(fits)}; thresholds with a later one: {at}"
        )
        for place, name in enumerate(("utility", "ponder")):
            ends = sum(depth(fit[0], fit[1 + place]) == loops_at_the_end(fit[0], fit[1 + place]) for fit in fits)
            print(f"- D@95 on the paper's grid is at its lowest threshold: {name} {ends}")
        print(f"- at the selected points later {selected.count(1)}, as late {selected.count(0)}, of {len(fits)}")
        for grid in ("paper", "fine"):
            for target in TARGETS:
                known = [[depth(model, readout, target, grid) for readout in both] for model, *both in fits]
                depths_of = [[math.inf if each is None else each for each in pair] for pair in known]
                wins = [sum(sign * (a - b) < 0 for a, b in depths_of if a != b) for sign in (1, -1)]
                print(f"- {grid} grid, D@{100 * float(target):g}: utility less {wins[0]}, ponder less {wins[1]}")

    def spans(self, task: str) -> None:
        title(f"{task}: average loops that the jointly trained gates span, and their mass by loop (D.1)")
        for model in sorted(self.jointly(task), key=lambda model: model["name"]):
            at = [found["average_loops"] for grid in ("paper", "fine") if (found := frontier(model, "gate", grid))]
            (low, high), fine = (min(at[0]), max(at[0])), f"{min(at[1]):.2f} to {max(at[1]):.2f}"
            table = model["exit_distribution"]
            mass = [
                sum(map(math.prod, zip(loop, table["counts"], strict=True)))
                for loop in zip(*table["values"], strict=True)
            ]
            shares = ", ".join(f"{100 * each / sum(table['counts']):.0f}" for each in mass)
            print(f"- {model['name']}: paper's grid {low:.2f} to {high:.2f} loops, fine grid {fine}; mass {shares} %")

    def ceilings(self, task: str) -> None:
        title(f"{task}: how many runs reach a target at all, at the best loop and with gate or margin (5.2)")
        fixed = [model for name, models in self.task(task).items() if name.endswith("-fixed") for model in models]
        for label, models, readout in (("fixed priors", fixed, "margin"), ("joint gates", self.jointly(task), "gate")):
            for target in TARGETS:
                best = sum(max(model["forced_accuracy"]) >= float(target) for model in models)
                reached = sum(depth(model, readout, target) is not None for model in models)
                print(f"- {label}, {target}: best loop {best}, {readout} {reached}, of {len(models)}")

    def every_prior(self, task: str) -> None:
        title(f"{task}: the fixed prior's margin and the jointly trained gates, every prior, fine grid (D)")
        for model in self.jointly(task):
            group, seed = model["name"].rsplit("-s", 1)
            prior = group.removeprefix(f"{task}-").partition("-")[0]
            other = next(each for each in self.groups[f"{task}-{prior}-fixed"] if each["name"].endswith(f"-s{seed}"))
            pairs = [(bounded(other, "margin", target), bounded(model, "gate", target)) for target in TARGETS]
            print(f"- {model['name']}: {' | '.join(map(' against '.join, pairs))}")

    def steps(self, task: str) -> None:
        title(f"{task}: steps from loop to loop of the bin means that go the other way (C.2, C.3)")
        for prior in PRIORS:
            for signal, way in (("margin", 1), ("entropy", -1)):
                for model in self.groups[f"{task}-{prior}-fixed"]:
                    steps = [
                        (loop + 2, way * (after - before))
                        for row in model["signals"][signal]["values"]
                        for loop, (before, after) in enumerate(pairwise(row))
                    ]
                    wrong = [(loop, -step) for loop, step in steps if step < 0]
                    share = f"{len(wrong)} of {len(steps)} ({100 * len(wrong) / len(steps):.0f} %)"
                    largest = max((step for _, step in wrong), default=0.0)
                    first, word = min((loop for loop, _ in wrong), default=0), "falls" if way > 0 else "rises"
                    where = f"into loop {first} or later, by at most {largest:.2g}"
                    print(f"- {model['name']}, {signal} {word} in {share}, {where}")

    def reproduced(self, task: str) -> None:
        title(f"{task}: what looks odd in the paper's tables, in ours on its grids")
        for prior in PRIORS:
            models = self.groups[f"{task}-{prior}-fixed"]
            print(f"- {prior}: {'; '.join(f'{readout} {depths(models, readout)}' for readout in CONFIDENCE)}")
        joint = self.jointly(task)
        pairs = [(model["name"], *(depth(model, "gate", target) for target in TARGETS[:2])) for model in joint]
        same = [f"{name} {low:.2f}" for name, low, high in pairs if low is not None and low == high]
        print(f"- D@95 = D@98 of the own gate in {len(same)} of {len(joint)}: {', '.join(same)}")
        for name, models in self.task(task).items():
            for target in TARGETS:
                known = [each for model in models if (each := depth(model, "fixed", target)) is not None]
                if 1 < len(known) < len(models) and statistics.mean(known) % 1:
                    print(f"- {name}, a fixed depth that reaches {target}: {over_seeds([*known, None])}")


def loops_at_the_end(model: Model, readout: str) -> float:
    """Of a gate on the paper's grid: below its lowest threshold nothing was tried."""
    found = frontier(model, readout) or {}
    return min(zip(found["thresholds"], found["average_loops"], strict=True))[1]


def bounded(model: Model, readout: str, target: str) -> str:
    """D@X on the fine grid with its interval; how many of the resamples reach it where they are few."""
    found = frontier(model, readout, "fine")
    interval = found["depth_interval"][target] if found else None
    text = over_seeds([depth(model, readout, target, "fine")])
    if interval is None:
        return text
    sure = interval["reached"] >= 0.95
    return text + (f" [{interval['low']:.2f}, {interval['high']:.2f}]" if sure else f" ({interval['reached']:.0%})")


def main() -> None:
    file = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/evidence/results.json.xz")
    content = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
    results = json.loads(content)
    TARGETS.extend(f"{target['accuracy']:g}" for target in results["targets"])
    claims = Claims(results)
    tasks = [task for task in ("mano", "parity") if claims.task(task)]
    for task in tasks:
        claims.blame(task)
        claims.like_with_like(task)
        claims.forced(task)
        claims.fitted(task)
        claims.utility_and_ponder(task)
        claims.spans(task)
        claims.ceilings(task)
    if "parity" in tasks:
        for task in tasks:
            claims.confidence(task)
            claims.ordering(task)
            claims.by_difficulty(task)
            claims.remedy(task)
            claims.every_prior(task)
            claims.steps(task)
            claims.reproduced(task)
        claims.extrapolation()
        claims.early_states()
    claims.stoppers()
    claims.certified()


if __name__ == "__main__":
    main()
