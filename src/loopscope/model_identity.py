"""Which model is it? The hash of its weights, and of a configuration that says how to compute with them.

Weights alone do not identify a model: one decoder can be looped in many ways, and rotary positions or damping can be
edited beside the same file. Older files and users' own recordings have the hash of the weights alone; then LoopScope
compares only the weights.
"""

_CONFIGURATION = "+config:"
_SHOWN = 12


def with_configuration(weights: str, configuration: str | None) -> str:
    """Join the hash of weights and a configuration to the identity of a model."""
    alone = weights_of(weights)
    return alone if configuration is None else f"{alone}{_CONFIGURATION}{configuration}"


def weights_of(model: str) -> str:
    """The hash of the weights alone, from the identity of a model."""
    return model.partition(_CONFIGURATION)[0]


def same_model(ours: object, theirs: object) -> bool:
    """Whether two identities mean one model; an unknown identity (None) equals only another unknown one."""
    if not isinstance(ours, str) or not isinstance(theirs, str):
        return ours == theirs
    our_weights, _, our_configuration = ours.partition(_CONFIGURATION)
    weights, _, configuration = theirs.partition(_CONFIGURATION)
    if not our_configuration or not configuration:
        return our_weights == weights
    return ours == theirs


def model_words(ours: str, theirs: str) -> str:
    """How two models differ, in a few words: in their weights, or only in their configuration."""
    our_weights, _, our_configuration = ours.partition(_CONFIGURATION)
    weights, _, configuration = theirs.partition(_CONFIGURATION)
    if our_weights != weights:
        return f"weights {our_weights[:_SHOWN]}, here {weights[:_SHOWN]}"
    return f"the same weights, computed with by another config.json: {our_configuration}, here {configuration}"
