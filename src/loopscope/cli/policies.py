"""How are policy files and fitted gates read, and for which models are they?"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loopscope.cli.output import print_note
from loopscope.errors import UserError
from loopscope.model_identity import same_model

if TYPE_CHECKING:
    from loopscope.exits import ExitPolicy
    from loopscope.exits.fitted import Fitted
    from loopscope.exits.scope import Scope
    from loopscope.trajectory import Trajectory

POLICIES = "policy file of one of the runs; its hash says which (repeatable)"


def check_any_model(options: argparse.Namespace) -> None:
    if options.any_model and not options.policy:
        raise UserError("--any-model is for a policy file; give it with --policy.")


def note_unknown_model(*models: str | None) -> None:
    """Says that what is used together may be of several models, where not all name their weights."""
    if None in models:
        print_note(
            f"{'Not all of these say' if set(models) != {None} else 'These do not say'} which model they are of; make "
            "sure that it is the same (provenance={'weights_sha256': ...} ties them together: docs/recordings.md)."
        )


def load_policy(path: Path, any_model: bool) -> "ExitPolicy":
    from loopscope.exits import ExitPolicy

    policy = ExitPolicy.load(path)
    return policy.for_any_model() if any_model else policy


def unnamed_model(path: Path | None, policy: "ExitPolicy | None") -> list[str]:
    """What is to be said, once work begins, of a policy that names no model: its promise is for the one it had."""
    if path is None or policy is None or policy.model is not None or policy.guarantee is None:
        return []
    return [f"{path} does not say which model it was calibrated for; its promise is for that one alone."]


def check_runnable(policy: "ExitPolicy", num_loops: int, here: "Scope", weights: str | None = None) -> None:
    """Refuses a rule that no model of this depth runs with, before it is loaded; without a hash, weights are compared
    when it is.
    """
    from loopscope.exits.exit_state import ExitState

    policy.check(weights, num_loops, here)
    ExitState(policy, num_loops)


def check_runs_on(policy: "ExitPolicy", run: Path) -> None:
    """Refuses a rule that the finished run in a folder cannot be run with."""
    from loopscope.exits.scope import Scope
    from loopscope.training.settings import read_run_settings

    check_runnable(policy, read_run_settings(run).num_loops, Scope(unit="answers"), run_weights(run))


def run_weights(run: Path) -> str:
    """The hash that tells the model of a finished run from any other, as its file says, without PyTorch."""
    from loopscope.models.configuration import WEIGHTS
    from loopscope.models.run_hashes import check_hashes, known_sha256

    check_hashes(run)
    return known_sha256(run.resolve() / WEIGHTS)


def policies_by_model(
    paths: Sequence[Path], models: Sequence[str | None], any_model: bool = False
) -> list[list["ExitPolicy"]]:
    """For each of these models (None: unknown) its own policies; one that names no model is everybody's."""
    loaded = [load_policy(path, any_model) for path in paths]
    for path, policy in zip(paths, loaded, strict=True):
        known = policy.model is None or None in models
        if not known and not any(same_model(policy.model, model) for model in models):
            raise UserError(
                f"{path} was calibrated for another model than these; add that run, or use it without its "
                "promise (--any-model)."
            )
    return [
        [policy for policy in loaded if None in (policy.model, model) or same_model(policy.model, model)]
        for model in models
    ]


def load_gates(folders: Sequence[Path], calibration: "Trajectory") -> dict[str, "Fitted"]:
    """Fitted gates and stoppers by the names of their folders; their thresholds are chosen on `calibration`."""
    from loopscope.exits.fitted import load_fitted

    gates: dict[str, Fitted] = {}
    for folder in folders:
        name = folder.absolute().name
        if name in gates:
            raise UserError(f"Two of the gates are named '{name}'; give their folders different names.")
        gates[name] = load_fitted(folder)
        gates[name].check_calibration(calibration)
    return gates
