"""Is what transformers loads a whole checkpoint, and where does it lie?"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from loopscope.errors import UserError

_OF_ANOTHER_FILE = ("subfolder", "variant", "state_dict", "gguf_file", "quantization_config")
"""Arguments of `from_pretrained` by which the weights are not those of the folder's own files."""


def check_keys(source: str, info: Mapping[str, Any]) -> None:
    """Refuses what would leave weights as memory happens to be, or leave some of a file out."""
    checkpoint = f"checkpoint in {source}"
    for problem, names in {
        f"The {checkpoint} has no tensor": info["missing_keys"],
        f"The configuration of the {checkpoint} does not know the tensor": info["unexpected_keys"],
        f"The configuration of the {checkpoint} has another shape for the tensor": [
            name for name, *_ in info["mismatched_keys"]
        ],
    }.items():
        if names:
            raise UserError(f"{problem} '{min(names)}'; fetch or make it again.")


def check_places(model: Any) -> None:
    """Refuses weights on several devices, or left on the disk."""
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if len(places) > 1 or places & {"disk", "meta"}:
        raise UserError(
            f"A looped model runs on one device, and this device_map has {', '.join(sorted(places))}: every loop would "
            "cross all of them; name one (device_map={'': 0}), or serve it with tensor parallelism."
        )


def own_folder(source: Any, options: Mapping[str, Any]) -> Path | None:
    """Where the files of a checkpoint lie (its folder, or what was fetched of it), if its weights are those there."""
    if any(options.get(name) for name in _OF_ANOTHER_FILE):
        return None
    if Path(source).is_dir():
        return Path(source).resolve()
    given = {name: options[name] for name in ("cache_dir", "revision", "token") if name in options}
    try:
        found = cached_file(source, "config.json", local_files_only=bool(options.get("local_files_only")), **given)
    except OSError:
        return None  # transformers says it better
    return None if found is None else Path(found).parent
