"""Which inputs are there? Every kind of file that is read, every argument, and arrays from Python."""

from . import arguments, checkpoints, custom_tasks, saved_models, sealed, user_files
from .runner import Kind

_ARGUMENTS = "run checkpoint llama looped recordings policies golden documents texts settings language_settings study"
_SLOW = "run checkpoint looped recordings policies store demo_store drawn benchmarks documents live_runs"
KINDS = {
    "recording": Kind(sealed.recording, 14, "recordings"),
    "provenance": Kind(sealed.provenance, 5, "run"),
    "example-texts": Kind(sealed.example_texts, 3, "run"),
    "live-run": Kind(sealed.live_run, 3, "live_runs"),
    "gate": Kind(sealed.gate, 5, "gates"),
    "policy": Kind(sealed.policy, 12, "policies recordings"),
    "monitor": Kind(sealed.monitor, 2, "policies monitor"),
    "run": Kind(sealed.finished_run, 8, "run other_run language_run custom_run documents"),
    "state": Kind(sealed.unfinished_run, 3, "unfinished finished_weights"),
    "study-store": Kind(sealed.study_store, 4, "store", quick=False),
    "titled-study": Kind(sealed.titled_study, 1, "drawn study store", quick=False),
    "unfinished-recording": Kind(sealed.unfinished_recording, 1, "unfinished_recording checkpoint", quick=False),
    "configuration": Kind(checkpoints.configuration, 8, "checkpoint golden looped"),
    "weights": Kind(checkpoints.weights, 8, "checkpoint golden looped"),
    "looping": Kind(checkpoints.looping, 4, "llama"),
    "tokenizer": Kind(checkpoints.tokenizer, 6, "checkpoint"),
    "tokenizer-parts": Kind(checkpoints.tokenizer_parts, 5, "checkpoint"),
    "saved-model": Kind(saved_models.saved_model, 5, "saved_models"),
    "model-card": Kind(saved_models.model_card, 1, "saved_models"),
    "custom-task": Kind(custom_tasks.custom_task, 5),
    "settings": Kind(user_files.run_settings, 8, "settings"),
    "assignment": Kind(user_files.assignment, 8, "settings"),
    "pretrain-settings": Kind(user_files.pretrain_settings, 4, "language_settings"),
    "study-file": Kind(user_files.study_file, 6, "study"),
    "deployment": Kind(user_files.deployment, 4, "golden policies"),
    "exits-log": Kind(user_files.exits_log, 2),
    "prompts": Kind(user_files.prompts, 5, "checkpoint documents"),
    "unfinished-texts": Kind(user_files.unfinished_texts, 2, "checkpoint unfinished_texts"),
    "examples": Kind(user_files.examples, 4, "run documents"),
    "documents": Kind(user_files.documents, 4, "checkpoint documents"),
    "benchmark": Kind(user_files.benchmark, 1, "checkpoint benchmarks", quick=False),
    "arguments": Kind(arguments.arguments, 12, f"{_ARGUMENTS} own_gate live_runs custom_run saved_models"),
    "slow-arguments": Kind(arguments.slow_arguments, 3, _SLOW, quick=False),
    "arrays": Kind(user_files.arrays, 5, "recordings"),
}
"""By name, each with its share of the inputs, and what of the world it needs."""
