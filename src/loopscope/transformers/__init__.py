"""How does a looped model live in transformers? Importing this registers Ouro, Huginn and looped Llamas with its Auto
classes: `from_pretrained`, `generate`, `Trainer` and PEFT work on them, without code from a checkpoint.
"""

from loopscope.errors import UserError

try:
    import transformers as _transformers
except ImportError:
    raise UserError("This needs transformers; install it with: pip install 'loopscope[transformers]'.") from None

from loopscope.pretrained_configuration import (
    HuginnPretrainedConfig,
    LoopedLlamaPretrainedConfig,
    OuroPretrainedConfig,
    register_configurations,
)
from loopscope.transformers.adaptive_generation import AdaptiveGenerateOutput
from loopscope.transformers.modeling import (
    LoopedForCausalLM,
    LoopedLlamaForCausalLM,
    LoopedOutput,
    OuroForCausalLM,
    RavenForCausalLM,
)
from loopscope.transformers.padded_batch import LoopedCache
from loopscope.transformers.trainer import LoopTrainer, lora_config

register_configurations()
for _model in (OuroForCausalLM, RavenForCausalLM, LoopedLlamaForCausalLM):
    _transformers.AutoModelForCausalLM.register(_model.config_class, _model)
