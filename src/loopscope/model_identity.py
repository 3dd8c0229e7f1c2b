"""Which model is it? The hash of its weights, and, where a configuration says how to compute with them, the hash of it.

Weights alone do not tell: one decoder can be looped in many ways, and rotary positions or damping can be edited beside
the same file. Files from before configurations were hashed, and recordings of a user's own, have the weights alone;
with those, weights alone are compared.
"""

_CONFIGURATION = "+config:"
_SHOWN = 12


def with_configuration(weights: str, configuration: str | None) -> str:
    """The text that tells a model from any other; `weights` may be such a text already, of another configuration."""
    alone = weights_of(weights)
    return alone if configuration is None else f"{alone}{_CONFIGURATION}{configuration}"


def weights_of(model: str) -> str:
    """The hash of the weights alone."""
    return model.partition(_CONFIGURATION)[0]


def same_model(ours: str | None, theirs: str | None) -> bool:
    """Whether these are one model, as far as both say; what is not known is the same as nothing but itself."""
    if ours is None or theirs is None:
        return ours is theirs
    our_weights, _, our_configuration = ours.partition(_CONFIGURATION)
    weights, _, configuration = theirs.partition(_CONFIGURATION)
    if not our_configuration or not configuration:
        return our_weights == weights
    return ours == theirs


def model_words(ours: str, theirs: str) -> str:
    """How two models differ, in short."""
    our_weights, _, our_configuration = ours.partition(_CONFIGURATION)
    weights, _, configuration = theirs.partition(_CONFIGURATION)
    if our_weights != weights:
        return f"weights {our_weights[:_SHOWN]}, here {weights[:_SHOWN]}"
    return f"the same weights, computed with by another config.json: {our_configuration}, here {configuration}"
