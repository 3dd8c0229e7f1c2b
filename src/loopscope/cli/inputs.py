"""What do the arguments name? Files, models, runs, readouts, gates, policies and devices, found without PyTorch."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

import loopscope as ls
from loopscope.certify.risk_target import AUTO
from loopscope.cli.options import Parser, add_shared, option
from loopscope.cli.output import print_note
from loopscope.errors import UserError, did_you_mean, reason
from loopscope.example_recordings import EXAMPLES, PREFIX, example_folder, example_of
from loopscope.exit_state import ExitState
from loopscope.files import is_file, is_folder, require_file
from loopscope.learned.attach import Fitted, load_fitted
from loopscope.model_identity import same_model
from loopscope.models import checkpoint_folder
from loopscope.models.checkpoint_folder import CONFIG, WEIGHTS
from loopscope.models.model_settings import not_registered
from loopscope.models.tokenizer import require_tokenizer
from loopscope.policy import ExitPolicy
from loopscope.readouts.readout import READOUTS, check_threshold, find_readout, needs_labels, unknown_readout
from loopscope.readouts.signals import FITTED_GATE, STOPPER
from loopscope.recording_paths import holds_recordings, run_of_recordings
from loopscope.scope import Scope
from loopscope.training.run_folder import read_run_settings, run_weights
from loopscope.training.settings import RunSettings
from loopscope.trajectory import Trajectory
from loopscope.user_code import is_user_name

if TYPE_CHECKING:
    import torch

POLICIES = "policy file for one of the runs; a hash in the file identifies the run (repeatable)"
GATES = "folder of a gate or stopper fitted to one of the runs; a hash in the folder identifies the run (repeatable)"
READOUT_NAMES: Final = ", ".join(name for name in READOUTS if not needs_labels(name))
RECORDED = "a run whose validation and test splits are recorded, or a folder with recordings named validation and test"


def text_file(text: str, what: str = "text file") -> Path:
    """Require a text file that an argument names."""
    require_file(Path(text), what)
    return Path(text)


def run_or_example(text: str) -> Path:
    """The folder of a run, of a shipped example (example:demo), or of one of the example's models."""
    return example_folder(text) if text.startswith(PREFIX) else Path(text)


def recording_argument(text: str) -> Path:
    """The folder of one model's recordings; a shipped example stands for one of its models."""
    run = run_or_example(text)
    example = example_of(run)
    return run / example.subject if example is not None and run.parent == EXAMPLES else run


def models_of(run: Path) -> list[Path]:
    """The models in a folder: a run itself, or every model of a shipped example."""
    example = example_of(run)
    return [run / name for name in example.models] if example is not None and run.parent == EXAMPLES else [run]


def reference_of(reference: str | None, runs: Sequence[Path]) -> Path | None:
    """The run that --reference names; a shipped example that is alone brings its own reference."""
    examples = [example_of(run) for run in runs]
    if reference is None and None not in examples and examples[0]:
        reference = examples[0].reference
    return None if reference is None else find_run(reference, runs)


def device_of(options: argparse.Namespace) -> "torch.device":
    """The device that --device names, or the best one; set the number of threads, too."""
    import torch

    from loopscope.models.device import check_device, keep_memory

    keep_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic; read at the first use of CUDA
    name = getattr(options, "device", "cpu")
    device = check_device(name)
    if name == "auto":
        options.device = str(device)
        other = "no GPU was found" if options.device == "cpu" else "--device cpu takes the CPU"
        options.chosen_device = f"Device: {options.device} ({other})."
    return device


def add_custom_readouts(parser: Parser) -> None:
    """Add the option that registers custom readouts."""
    text = "import and add a custom readout (repeatable)"
    option(parser, "--with-readout MODULE:NAME", text, action="append", type=_import_custom_readout)


def add_custom_tasks(parser: Parser) -> None:
    """Add the option that imports custom tasks."""
    text = "import the custom task on which the run was trained (repeatable)"
    option(parser, "--with-task MODULE:CLASS", text, action="append")


def add_policy_options(parser: Parser) -> None:
    """Add the options beside --policy: for another model, and for custom readouts."""
    add_shared(parser, "--any-model")
    add_custom_readouts(parser)


def add_custom_model(parser: Parser) -> None:
    """Add the option that imports a custom model."""
    text = "import a custom model class, so that LoopScope can load its runs (repeatable)"
    option(parser, "--with-model MODULE:CLASS", text, action="append", type=_model_class_name)


def _model_class_name(given: str) -> str:
    """Check that a custom model is written as MODULE:CLASS."""
    if not is_user_name(given):
        raise UserError(f"'{given}' names no class; --with-model takes MODULE:CLASS.")
    return given


def import_models(options: argparse.Namespace) -> None:
    """Import the custom models that --with-model names."""
    if options.with_model:
        from loopscope.models.custom_model import register_model

        for name in options.with_model:
            register_model(name)


def readout_name(given: str) -> str:
    """The name of a readout; import one written as MODULE:NAME, because the user typed it."""
    return given if given.startswith((FITTED_GATE, STOPPER)) or ":" not in given else _import_custom_readout(given)


def _import_custom_readout(given: str) -> str:
    """Register a custom readout written as MODULE:NAME; LoopScope imports none that only a file names."""
    module, _, attribute = given.partition(":")
    here = sys.path[:]
    sys.path.insert(0, "")  # as `python -m` does: the module may lie in the current folder
    try:
        found = getattr(import_module(module), attribute, None) if attribute else None
    except Exception as error:
        places = "its module must be in the current folder, in PYTHONPATH, or installed"
        raise UserError(f"The readout '{given}' cannot be imported: {reason(error)}; {places}.") from error
    finally:
        sys.path[:] = here
    if not isinstance(found, ls.Readout):
        raise UserError(f"'{given}' is none: it takes MODULE:NAME, where NAME must be a loopscope.Readout.")
    return ls.register_readout(found).name


def check_readouts(*names: str, oracle: bool = False, auto: bool = False) -> None:
    """Reject unknown readouts; `oracle` and `auto`: whether the verb accepts these."""
    known = [AUTO] * auto + [name for name in READOUTS if oracle or not needs_labels(name)]
    for name in names:
        if name in READOUTS and name not in known:
            others = f"choose one of {', '.join(known)}"
            raise UserError(f"The oracle needs the labels, so only `loopscope sweep` takes it; {others}.")
        if name not in known and find_readout(name) is None:
            raise unknown_readout(name, known)


def policy_by_hand(readout: str, threshold: float | None, gate: Fitted | None = None) -> ExitPolicy:
    """A policy from a readout and a threshold that are typed; some value of the signal must meet it."""
    policy = ExitPolicy(readout, threshold, gate)
    check_threshold(readout, threshold or 0)
    return policy


def load_policy(path: Path, any_model: bool) -> ExitPolicy:
    """Load the policy that an argument names; `any_model` ignores which model it is for."""
    policy = ExitPolicy.load(path)
    return policy.for_any_model() if any_model else policy


def policies_by_model(
    paths: Sequence[Path], models: Sequence[str | None], any_model: bool = False
) -> list[list[ExitPolicy]]:
    """The policies of each model (None: unknown); a policy that names no model belongs to every model."""
    loaded = [load_policy(path, any_model) for path in paths]
    for path, policy in zip(paths, loaded, strict=True):
        known = policy.model is None or None in models
        if not known and not any(same_model(policy.model, model) for model in models):
            choice = "add that run, or use it without its guarantee (--any-model)"
            raise UserError(f"{path} was calibrated for another model than these; {choice}.")
    return [
        [policy for policy in loaded if None in (policy.model, model) or same_model(policy.model, model)]
        for model in models
    ]


def check_runnable(policy: ExitPolicy, num_loops: int, here: Scope, weights: str | None = None) -> None:
    """Reject a policy that cannot run with a model of this depth, before loading the model."""
    policy.check(weights, num_loops, here)
    ExitState(policy, num_loops)


def check_runs_on(policy: ExitPolicy, run: Path, loops: int | None = None) -> None:
    """Reject a policy that the finished run in a folder cannot run with, at its depth or at `loops`."""
    check_runnable(policy, loops or read_run_settings(run).num_loops, Scope(unit="answers"), run_weights(run))


def unnamed_model(path: Path | str | None, policy: ExitPolicy | None) -> list[str]:
    """The note about a policy that names no model: its guarantee is for the model it was calibrated with."""
    if path is None or policy is None or policy.model is not None or policy.guarantee is None:
        return []
    return [f"{path} does not say which model it was calibrated for; its guarantee is for that one alone."]


def note_unknown_model(*models: str | None) -> None:
    """Note that recordings or policies may come from different models, if some do not name theirs."""
    if None in models:
        tied = "(provenance={'weights_sha256': ...} ties them together: docs/how-to/recordings.md)"
        print_note(f"Not all of these say which model they are of; make sure that it is the same {tied}.")


def load_gates(folders: Sequence[Path], calibration: Trajectory) -> dict[str, Fitted]:
    """Load fitted gates and stoppers by folder name; reject those that were fitted to `calibration`."""
    gates: dict[str, Fitted] = {}
    for folder in folders:
        name = folder.absolute().name
        if name in gates:
            raise UserError(f"Two of the gates are named '{name}'; give their folders different names.")
        gates[name] = load_fitted(folder)
        gates[name].check_calibration(calibration)
    return gates


def gates_by_model(folders: Sequence[Path], calibrations: Sequence[Trajectory]) -> list[dict[str, Fitted]]:
    """The fitted gates and stoppers of each model, by its validation recording and their folder names."""
    models = [recording.provenance.get("weights_sha256") for recording in calibrations]
    own: list[list[Path]] = [[] for _ in models]
    for folder in folders:
        of = load_fitted(folder).provenance.get("weights_sha256")
        unknown = len(models) == 1 and None in (of, models[0])
        fitting = [place for place, model in enumerate(models) if unknown or (of and model and same_model(of, model))]
        if not fitting:
            raise UserError(f"{folder} was fitted to none of these models, as their hashes say; add its run.")
        for place in fitting:
            own[place].append(folder)
    return [load_gates(found, recording) for found, recording in zip(own, calibrations, strict=True)]


def finished_run(run: Path, with_model: Sequence[str] = ()) -> RunSettings:
    """The settings of a finished run whose model can be loaded; `with_model` names a custom model."""
    _check_no_recordings(run)
    settings = read_run_settings(run)
    if settings.model.is_custom and settings.model.name not in with_model:
        raise not_registered(str(settings.model.name))
    if not (run / WEIGHTS).is_file():
        raise UserError(f"The run in {run} is not finished: it has no {WEIGHTS}; continue it with `loopscope train`.")
    return settings


def _check_no_recordings(folder: Path) -> None:
    """Reject a folder of recordings where a command needs the model itself."""
    if str(folder).startswith(PREFIX):
        raise UserError(f"{folder} has recordings, and this needs the model; make the run with `loopscope demo`.")
    if not is_file(folder / CONFIG) and holds_recordings(folder):
        known = run_of_recordings(folder)
        which = (
            f"the run: {known}"
            if is_file(known / CONFIG)
            else (
                "the folder of the run or checkpoint that was recorded, or run a custom model from Python "
                "(docs/how-to/your-model.md)"
            )
        )
        raise UserError(f"{folder} holds recordings, and this needs the model; give {which}.")


def find_model(source: str | Path, text: bool = False) -> Path:
    """The folder of a checkpoint, downloaded from the Hub if needed; `text` requires a tokenizer."""
    folder = checkpoint_folder.find_checkpoint(source)
    _check_no_recordings(folder)
    checkpoint_folder.require_config(folder)
    if text and checkpoint_folder.is_of_task(folder):
        verbs = "record the task with `loopscope record task`, or answer its examples with `loopscope answer`"
        raise UserError(f"{folder} is a model of a task, which takes no text; {verbs}.")
    if text:
        require_tokenizer(folder)
    return folder


def load_text_model(folder: Path, options: argparse.Namespace) -> "ls.LoopedModel":
    """Load a language model with the options --device, --dtype and --compile."""
    model = ls.load_model(folder, device_of(options), options.dtype)
    if options.compile:
        model.compile()
    return model


def find_run(given: str | Path, runs: Sequence[Path]) -> Path:
    """The run that --reference or --with names: a folder, or the name of one of these runs or of its neighbour."""
    if str(given).startswith(PREFIX):
        return recording_argument(str(given))
    name, folders = str(given), [run_of_recordings(run).resolve() for run in runs]
    named, homes = [run for run in folders if run.name == name], {run.parent for run in folders}
    for place in (*named, Path(name), *(home / name for home in homes)):
        if is_folder(place):
            return place
    beside = {each.name for home in homes if is_folder(home) for each in home.iterdir() if each.is_dir()}
    what = "give the folder of one, or the name of one of these runs or of one beside them"
    raise UserError(f"There is no run '{name}'{did_you_mean(name, beside)}; {what}.")
