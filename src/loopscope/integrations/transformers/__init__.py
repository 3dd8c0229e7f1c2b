"""How does a looped model run in transformers? Importing this package registers Ouro, Huginn and looped Llamas with its
Auto classes: `from_pretrained`, `generate`, `Trainer` and PEFT work on them, without code from a checkpoint.
"""

import transformers as _transformers
import transformers.trainer as _trainer

from loopscope.integrations.pretrained_configuration import register_configurations
from loopscope.integrations.transformers.modeling import (
    LoopedForCausalLM,
    LoopedLlamaForCausalLM,
    OuroForCausalLM,
    RavenForCausalLM,
)
from loopscope.integrations.transformers.padded_batch import LoopedCache
from loopscope.integrations.transformers.trainer import LoopTrainer, RejectMixedTexts, lora_config

register_configurations()
for _model in (OuroForCausalLM, RavenForCausalLM, LoopedLlamaForCausalLM):
    _transformers.AutoModelForCausalLM.register(_model.config_class, _model)
_trainer.DEFAULT_CALLBACKS.append(RejectMixedTexts)
