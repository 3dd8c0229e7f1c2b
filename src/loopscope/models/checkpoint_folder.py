"""What does a checkpoint's folder contain before its weights are read? Model, files, hashes, found without PyTorch.

A checkpoint is a folder, or a name on the Hub, which may pin its revision: `ByteDance/Ouro-1.4B@0123abc`. LoopScope
fetches only its data, never its code.

`hashes.json` holds the hash of every file that a run of LoopScope wrote. The run writes it before the weights, which
come last: a run that is killed in between has no weights, so it goes on and writes both again. LoopScope accepts a
folder without hashes (a checkpoint from the Hub, copied weights) as it is.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec

from loopscope.artifacts import sha256
from loopscope.config import Loops, Positions, Vocabulary, digest, read_json, to_json, write_json
from loopscope.errors import UserError
from loopscope.files import is_file, is_folder, is_plain_name, no_folder
from loopscope.models.model_settings import ModelSettings
from loopscope.scope import CacheMode

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HASHES = "hashes.json"
GENERATION = "generation_config.json"
BESIDE_WEIGHTS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *(GENERATION, "chat_template.jinja"),
)
"""Files that a checkpoint may have beside configuration and weights; a checkpoint made from it keeps them."""
POLICY = "exit_policy/policy.json"
"""The exit policy saved with a model; in its own folder, so that its gate is not taken for weights."""
FETCHED = ("*.json", "*.safetensors", "*.txt", "*.jinja")

LOOPED = ("loopscope", "ouro", "huginn_raven", "looped_llama")
"""The `model_type` of checkpoints that LoopScope reads."""
Source = Literal["llama", "mistral", "qwen2", "qwen3"]
SOURCES: tuple[Source, ...] = ("llama", "mistral", "qwen2", "qwen3")
"""The `model_type` of checkpoints that can be looped; SmolLM is a Llama."""
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_REASONS = {
    "LocalEntryNotFoundError": "it cannot be reached",
    "RepositoryNotFoundError": "it has none of this name, or not for you",
    "GatedRepoError": "its owner wants terms to be accepted there before",
    "RevisionNotFoundError": "it has no such revision",
}
"""Reasons by the names of huggingface_hub's errors, whose own texts are for programmers."""


def find_checkpoint(source: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint: the given folder, or the local folder of the fetched Hub files."""
    path = Path(source)
    if is_folder(path):
        return path
    name, _, pinned = str(source).partition("@")
    if is_file(path) or not _HUB_NAME.fullmatch(name) or str(source).startswith("."):
        raise no_folder(path, "the folder of a checkpoint, or its name on the Hub")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision or pinned or None, allow_patterns=list(FETCHED)))
    except Exception as error:  # not reachable, unknown, forbidden: each library raises its own errors
        message = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        reason = _HUB_REASONS.get(type(error).__name__, message)
        raise UserError(
            f"There is no folder {path}, and the Hub does not give it ({reason}); check the name and the connection."
        ) from None


class ModelType(msgspec.Struct, frozen=True):
    """The key of `config.json` that names the kind of a model."""

    model_type: str


class CheckpointConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Hold the `config.json` of LoopScope's own checkpoints."""

    model_type: Literal["loopscope"] = "loopscope"
    schema_version: Literal[1] = 1
    vocab_size: Vocabulary
    block_size: Positions
    model: ModelSettings
    run: dict[str, Any]  # the settings of the run that trained it


def read_checkpoint_config(folder: Path) -> CheckpointConfig:
    """Read the `config.json` of a LoopScope checkpoint."""
    return read_json(CheckpointConfig, folder / CONFIG, "checkpoint configuration")


def require_config(folder: Path) -> None:
    """Reject a folder that is not a checkpoint."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a checkpoint: it has no {CONFIG}; give the folder of a model.")


def read_model_type(folder: Path) -> str:
    """Read the `model_type` of a checkpoint."""
    require_config(folder)
    return read_json(ModelType, folder / CONFIG, "model configuration").model_type


def is_of_task(folder: Path) -> bool:
    """Whether the checkpoint is a model of a task's examples, not of text."""
    return read_model_type(folder) == "loopscope"


def looped_model_type(folder: Path) -> str:
    """The `model_type` of a checkpoint; rejects a model that is not looped."""
    kind = read_model_type(folder)
    if kind not in LOOPED:
        loops = "; loop it first (`loopscope loop`)" if kind in SOURCES else ""
        raise UserError(f"{folder} holds a model of type '{kind}'; LoopScope reads {', '.join(LOOPED)}{loops}.")
    return kind


class ModelShape(NamedTuple):
    """Hold the depth of a checkpoint's model and its longest row."""

    num_loops: int
    block_size: int  # tokens of the longest row


class _LoopsKey(msgspec.Struct, frozen=True):
    """The loops in the configuration of a LoopScope checkpoint or a looped Llama."""

    loops: Loops


class _ShapeKeys(msgspec.Struct, frozen=True):
    """The keys of `config.json` that give a model's depth and longest row; each kind of model has its own."""

    model: _LoopsKey | None = None  # LoopScope's own
    total_ut_steps: Loops | None = None  # Ouro
    mean_recurrence: Loops | None = None  # Huginn
    looping: _LoopsKey | None = None  # looped Llamas
    block_size: Positions | None = None
    max_position_embeddings: Positions | None = None


def read_model_shape(folder: Path) -> ModelShape:
    """Read the loops of a checkpoint's model, and its longest row."""
    looped_model_type(folder)
    shape = read_json(_ShapeKeys, folder / CONFIG, "model configuration")
    looping = shape.model or shape.looping
    loops = shape.total_ut_steps or shape.mean_recurrence if looping is None else looping.loops
    longest = shape.block_size or shape.max_position_embeddings
    if loops is None or longest is None:
        raise UserError(f"{folder / CONFIG} does not say how deep the model is, or how long a text it takes.")
    return ModelShape(loops, longest)


class _EndTokens(msgspec.Struct, frozen=True):
    """The key of a configuration that names the end tokens."""

    eos_token_id: TokenId | list[TokenId] | None = None
    vocab_size: int | None = None


def end_tokens(folder: Path) -> set[int]:
    """The tokens that end a text, from the model's configuration and its generation configuration."""
    ends: set[int] = set()
    size: int | None = None
    for name in (CONFIG, GENERATION):
        if (folder / name).is_file():
            config = read_json(_EndTokens, folder / name, "model configuration")
            size = size or config.vocab_size
            if config.eos_token_id is not None:
                ends |= {config.eos_token_id} if isinstance(config.eos_token_id, int) else set(config.eos_token_id)
    if size is not None and ends and max(ends) >= size:
        raise UserError(
            f"The checkpoint in {folder} ends texts with the token {max(ends)}, and its vocabulary has {size:,}; "
            "correct its eos_token_id."
        )
    return ends


def beside_weights(folder: Path, name: str) -> bytes:
    """A file beside the weights, for a checkpoint made from this one: without the exit policy of the old weights."""
    data = (folder / name).read_bytes()
    if name != GENERATION:
        return data
    config = read_json(dict[str, Any], folder / GENERATION, "generation configuration")
    if "policy" not in config:
        return data
    return to_json({key: value for key, value in config.items() if key not in GenerationExits.__struct_fields__})


class GenerationExits(msgspec.Struct, frozen=True, omit_defaults=True):
    """The exit policy and cache in a generation configuration."""

    policy: str | None = None  # a file, relative to the checkpoint's folder
    cache: CacheMode | None = None  # None: the cache mode for which the policy was calibrated
    lossless: bool = False

    @classmethod
    def read(cls, file: Path) -> Self:
        exits = read_json(cls, file, "generation configuration")
        path = PurePosixPath(exits.policy or "")
        if path.is_absolute() or ".." in path.parts:
            raise UserError(
                f"{file} names the exit policy '{path}', which lies outside of its folder; save the model with its "
                "policy (model.exit_policy = ..., save_pretrained)."
            )
        return exits


def named_exits(folder: Path, drafts: bool = False) -> GenerationExits:
    """The exit settings in a checkpoint's `generation_config.json`, with the policy as the path of its file.

    Unless the caller can write lossless texts (`drafts`), a configuration that asks for them is rejected.
    """
    if not (folder / GENERATION).is_file():
        return GenerationExits()
    exits = GenerationExits.read(folder / GENERATION)
    if exits.policy is None:
        return GenerationExits()
    if not is_file(folder / exits.policy):
        raise no_named_policy(exits.policy, folder)
    if exits.lossless and not drafts:
        raise UserError(
            f"{GENERATION} of {folder} asks for lossless texts, which `loopscope generate` and transformers write; "
            "remove 'lossless' from it, or ask for a number of loops."
        )
    return msgspec.structs.replace(exits, policy=str(folder / exits.policy))


def no_named_policy(name: str, source: str | Path) -> UserError:
    """The error for a policy that a generation configuration names and that does not exist."""
    return UserError(
        f"{GENERATION} of {source} names the exit policy '{name}', and there is no such file; put it there, or remove "
        "'policy' from the configuration."
    )


class _QuantisationKey(msgspec.Struct, frozen=True):
    """The key of `config.json` that describes quantised weights."""

    quantization_config: dict[str, Any] | None = None


def check_plain(folder: Path) -> None:
    """Reject a checkpoint with quantised weights; transformers reads them."""
    require_config(folder)
    if read_json(_QuantisationKey, folder / CONFIG, "model configuration").quantization_config is not None:
        raise UserError(
            f"The weights in {folder} are quantised; load them by transformers (AutoModelForCausalLM.from_pretrained, "
            "with `import loopscope.integrations.transformers`): its `looped` is the model for LoopScope."
        )


class _ShardIndex(msgspec.Struct, frozen=True):
    """The index of a checkpoint's weight files."""

    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """The files with a checkpoint's weights: one file, or shards."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise UserError(
            f"{folder} has no weights: neither {WEIGHTS} nor {INDEX} is there; if it is a run that is not finished, "
            "continue it with `loopscope train`."
        )
    names = sorted(set(read_json(_ShardIndex, folder / INDEX, "shard index").weight_map.values()))
    for name in names:
        if not is_plain_name(name):
            raise UserError(
                f"{folder / INDEX} names the file '{name}', which does not lie beside it; fetch or make it again."
            )
    return [folder / name for name in names]


def stored_sha256(folder: Path) -> str:
    """The hash of a checkpoint's weights alone: of the file, or of the shards' hashes."""
    files = weight_files(folder)
    if len(files) == 1:
        return known_sha256(files[0])
    return digest({file.name: known_sha256(file) for file in files})


class RunHashes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of `hashes.json`: the hash of every file that a run wrote."""

    files: dict[str, str]
    digest: str  # of `files`


def write_hashes(folder: Path, files: Mapping[str, str]) -> None:
    """Write the hashes of files of `folder` into its `hashes.json`."""
    write_json(folder / HASHES, RunHashes(dict(files), digest(files)))


def check_hashes(folder: Path) -> None:
    """Reject a folder whose files differ from those that its run wrote; missing files are allowed."""
    if not (folder / HASHES).is_file():
        return
    hashes = read_json(RunHashes, folder / HASHES, "list of hashes")
    altered = [] if digest(hashes.files) == hashes.digest else [HASHES]
    for name, expected in hashes.files.items():
        file = folder.resolve() / name
        if not altered and file.is_file() and known_sha256(file) != expected:
            altered.append(name)
    if altered:
        raise UserError(
            f"{folder / altered[0]} was altered since its run wrote it; train the run again in another folder, or "
            f"remove {HASHES} if the change is yours."
        )


def known_sha256(file: Path) -> str:
    """The hash of a file, computed once in a process while the file stays unchanged."""
    now = file.stat()
    return _cached_sha256(file, (now.st_size, now.st_ino, now.st_mtime_ns, now.st_ctime_ns))


@lru_cache(maxsize=64)
def _cached_sha256(file: Path, _: tuple[int, ...]) -> str:
    """The hash of a file, cached by the file's state."""
    return sha256(file)
