"""Which inputs are there? Every kind of file that is read, every argument, every public function."""

from . import arguments, checkpoints, python_api, sealed, settings, texts
from .runner import Kind

KINDS = {
    "recording": Kind(sealed.recording, 14),
    "gate": Kind(sealed.gate, 5),
    "policy": Kind(sealed.policy, 12),
    "run": Kind(sealed.finished_run, 8),
    "state": Kind(sealed.unfinished_run, 3),
    "study-store": Kind(sealed.study_store, 6, quick=False),
    "configuration": Kind(checkpoints.configuration, 8),
    "weights": Kind(checkpoints.weights, 8),
    "tokenizer": Kind(checkpoints.tokenizer, 6),
    "settings": Kind(settings.run_settings, 8),
    "assignment": Kind(settings.assignment, 8),
    "pretrain-settings": Kind(settings.pretrain_settings, 4),
    "study-file": Kind(settings.study_file, 6),
    "prompts": Kind(texts.prompts, 5),
    "question": Kind(texts.question, 2),
    "examples": Kind(texts.examples, 4),
    "documents": Kind(texts.documents, 4),
    "benchmark": Kind(texts.benchmark, 1, quick=False),
    "arguments": Kind(arguments.arguments, 14),
    "python": Kind(python_api.python, 14),
}
"""By name, each with its share of the inputs."""
