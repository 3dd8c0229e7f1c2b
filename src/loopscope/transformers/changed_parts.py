"""Was a looped model changed since it was made, in a way that its network would pass by? Then it is refused: whoever
set a value in its configuration, or put an adapter or noise around its embeddings, means something by it.
"""

from typing import Any

from loopscope.errors import UserError
from loopscope.models.ouro import EARLY_EXIT


def check_unchanged(model: Any) -> None:
    """Refuses a model before it runs."""
    check_config(model)
    embeddings = model.get_input_embeddings()
    if model.training and getattr(embeddings, "neftune_noise_alpha", None) is not None:
        raise UserError(
            "Noise on embeddings (neftune_noise_alpha) goes by padded rows, and rows are packed here; leave it out."
        )
    if model.head_is_embedding and hasattr(embeddings, "base_layer"):
        raise UserError(
            "The embeddings of this model are its head, too, which an adapter on them would not change; leave them out "
            "of target_modules, or train them whole (modules_to_save)."
        )


def check_config(model: Any) -> None:
    """Refuses a configuration that was changed after the network was made of it: nothing followed the change."""
    if (depth := model.configured_depth(model.config)) != model.num_loops:
        raise UserError(
            f"The configuration was changed to {depth} loops, and the model has {model.num_loops}; give another depth "
            "to from_pretrained, or num_loops to a call."
        )
    if getattr(model.config, "early_exit_threshold", 1) not in (None, 1):
        raise UserError(f"{EARLY_EXIT} (generate(policy=...)).")
