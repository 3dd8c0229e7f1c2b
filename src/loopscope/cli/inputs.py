"""Is what the arguments name there, and is it what is meant? Said before PyTorch or lm_eval is imported."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from loopscope.errors import UserError, did_you_mean
from loopscope.reading import is_file, is_folder, require_file
from loopscope.recording_places import holds_recordings, run_of_recordings

AUTO = "auto"


def check_texts(paths: Iterable[Path]) -> None:
    for path in paths:
        require_file(path, "text file")


def check_readouts(options: argparse.Namespace, *names: str, oracle: bool = False, auto: bool = False) -> None:
    """Those of --readout, and these; whether the verb takes the oracle, and `auto`."""
    given = getattr(options, "readout", None) or ()
    if not given and not names:
        return
    from loopscope.exits.readouts import READOUTS, find_readout, no_readout

    for name in (*names, *((given,) if isinstance(given, str) else given)):
        if "," in name:
            raise UserError(f"'{name}' is not one readout; give one at a time, and --readout again for the next.")
        if (auto and name == AUTO) or find_readout(name) is not None:
            continue
        known = [AUTO] * auto + [each for each, kind in READOUTS.items() if oracle or kind != "oracle"]
        if name in READOUTS and name not in known:
            raise UserError(
                f"The {name} needs the labels, so only `loopscope evaluate` takes it; choose one of {', '.join(known)}."
            )
        if name not in known:
            raise no_readout(name, known)


def check_run(run: Path) -> None:
    """A run that is finished, whose model can be loaded."""
    from loopscope.models.configuration import WEIGHTS
    from loopscope.training.settings import read_run_settings

    _check_no_recordings(run)
    read_run_settings(run)
    if not (run / WEIGHTS).is_file():
        raise UserError(f"The run in {run} is not finished: it has no {WEIGHTS}; continue it with `loopscope train`.")


def _check_no_recordings(folder: Path) -> None:
    """Refuses a folder of recordings where their model is needed."""
    from loopscope.models.configuration import CONFIG

    if not is_file(folder / CONFIG) and holds_recordings(folder):
        known = run_of_recordings(folder)
        which = f"the run: {known}" if is_file(known / CONFIG) else "the folder of the run that they are of"
        raise UserError(f"{folder} holds recordings, and this needs the model; give {which}.")


def find_model(source: str, text: bool = False) -> Path:
    """The folder of a checkpoint, fetched from the Hub if need be; `text`: with a tokenizer."""
    from loopscope.models.configuration import is_of_task, require_config
    from loopscope.models.hub import find_checkpoint
    from loopscope.models.tokenizer import require_tokenizer

    folder = find_checkpoint(source)
    _check_no_recordings(folder)
    require_config(folder)
    if text and is_of_task(folder):
        raise UserError(
            f"{folder} is a model of a task, which takes no text; record the task with `loopscope record task`, or "
            "answer its examples with `loopscope run`."
        )
    if text:
        require_tokenizer(folder)
    return folder


def find_run(given: str | Path, runs: Sequence[Path]) -> Path:
    """The run that --reference or --with means: a folder, or the name of one of these runs or of one beside them."""
    name, folders = str(given), [run_of_recordings(run).resolve() for run in runs]
    named, homes = [run for run in folders if run.name == name], {run.parent for run in folders}
    for place in (*named, Path(name), *(home / name for home in homes)):
        if is_folder(place):
            return place
    beside = {each.name for home in homes for each in _folders(home)}
    raise UserError(
        f"There is no run '{name}'{did_you_mean(name, beside)}; give the folder of one, or the name of one of these "
        "runs or of one beside them."
    )


def _folders(place: Path) -> list[Path]:
    return [each for each in place.iterdir() if each.is_dir()] if is_folder(place) else []
