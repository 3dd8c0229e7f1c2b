"""Prints the numbers with which docs/results/README.md judges the paper's claims, from the study's results.json.

python scripts/claims.py [runs/mano/report/results.json | docs/results/results.json.xz]

Of another study of MANO, such as `mano-mod3`, it prints what needs no run that only `mano` has.
"""

import json
import lzma
import math
import statistics
import sys
from collections.abc import Sequence
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


def main() -> None:
    file = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results/results.json.xz")
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
    if "parity" in tasks:
        for task in tasks:
            claims.confidence(task)
            claims.ordering(task)
            claims.by_difficulty(task)
            claims.remedy(task)
        claims.extrapolation()
        claims.early_states()
    claims.stoppers()
    claims.certified()


if __name__ == "__main__":
    main()
