"""How is a looped model fine-tuned in transformers? By its `Trainer`, with an objective over depth.

Everything else of `Trainer` is unchanged: data, optimizers, accumulation, precision, several processes, checkpoints and
resuming, trackers. The objectives are those of `loopscope.training.objectives`, over tokens; the log has values by
loop, too. PEFT puts adapters on the model beforehand (`lora_config`).

Shapes: T loops, N tokens with a label.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from loopscope.config import build, plain
from loopscope.errors import UserError
from loopscope.integrations.transformers.modeling import LoopedForCausalLM, LoopedOutput, TeacherLogits
from loopscope.integrations.transformers.padded_batch import PaddedBatch
from loopscope.training.language_run import adaptable_layers
from loopscope.training.objectives import LoopLosses, draw_unrolling, exit_weights, load_objective
from loopscope.training.settings import GATED, Objective, UserFunction, custom_objective, with_source

_NOT_TAKEN = ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func")
"""Arguments of `Trainer` that would have no effect here."""


class LoopTrainer(Trainer):  # type: ignore[misc]
    """Train Ouro, Huginn and looped Llamas with `Trainer`, whole or with PEFT adapters.

    `objective` is the name of a built-in objective, an `Objective` with its settings, or a function of `LoopLosses`.
    With a `teacher`, every loop learns the teacher's predictions (after `teacher_loops` loops, if the teacher is
    looped) instead of the labels, which then only select the tokens.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *,
        objective: Objective | str | UserFunction = "fixed_prior",
        teacher: Any = None,
        teacher_loops: int | None = None,
        **options: Any,
    ) -> None:
        looped = _without_adapters(model).looped
        self.objective = _as_objective(objective)
        gate: Any = getattr(looped, "gate", None)
        if self.objective.name in GATED and not (gate and any(each.requires_grad for each in gate.parameters())):
            raise UserError(
                f"The objective '{self.objective.name}' trains the gate, and this model has none, or its weights are "
                "held still; choose another, or let them be trained (modules_to_save, which lora_config sets)."
            )
        super().__init__(model, args, **options)
        ignored = [name for name in _NOT_TAKEN if options.get(name) is not None]
        ignored += ["label_smoothing_factor"] if self.args.label_smoothing_factor else []
        if ignored:
            raise UserError(
                f"LoopTrainer computes losses and accuracies of every loop, and keeps no logits for {ignored[0]}; "
                "leave it out, or use transformers' Trainer, which runs the last loop."
            )
        if self.args.n_gpu > 1:
            raise UserError(
                "Several GPUs are trained by several processes; start this with torchrun or accelerate launch."
            )
        function = objective if callable(objective) else None
        self._minimised = load_objective(self.objective, self.args.seed, function)
        self._teacher = self._taught_by(teacher, teacher_loops)
        self._sums = {training: self._no_sums() for training in (True, False)}
        """For every loop [4, T]: tokens since the last report, their losses, right answers, and the gate's exits."""
        self._evaluated = torch.zeros(2, dtype=torch.float64)  # losses times tokens, and tokens

    def _taught_by(self, teacher: Any, loops: int | None) -> TeacherLogits | None:
        if isinstance(teacher, (str, Path)):
            teacher = AutoModelForCausalLM.from_pretrained(teacher)
        if loops is not None and not isinstance(teacher, LoopedForCausalLM):
            raise UserError("teacher_loops is given without a teacher that is a looped model; leave it out.")
        if teacher is None:
            return None
        if {*map(id, teacher.parameters())} & {*map(id, self.model.parameters())}:
            raise UserError(
                "The teacher has weights of the model itself, which would be held still; give its folder, or a copy "
                "(copy.deepcopy)."
            )
        depth = {} if loops is None else {"num_loops": loops}
        teacher = teacher.eval().requires_grad_(False).to(self.args.device)

        @torch.no_grad()
        def logits(tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
            return teacher(input_ids=tokens, attention_mask=attention_mask, **depth).logits

        return logits

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and save the objective in the configuration; the run that a LoopScope checkpoint names is removed."""
        config = _without_adapters(self.model).config
        config.fine_tuning = {"objective": plain(self.objective), "seed": self.args.seed}
        if hasattr(config, "run"):
            config.fine_tuning["start"] = config.run
            del config.run
        return super().train(*args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Skip a run that has all its steps: resumed, transformers would take one more every time."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:
            self.control.should_training_stop = True

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count the labels with a loss; transformers would count all that are not -100."""
        counted = [
            {
                **batch,
                "labels": PaddedBatch.counted(batch["labels"], batch.get("attention_mask"), batch.get("position_ids")),
            }
            if "labels" in batch
            else batch
            for batch in batch_samples
        ]
        return super()._get_num_items_in_batch(counted, device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The objective of a batch; its number of loops is drawn from the run's seed and the step."""
        training, step = model.training, self.state.global_step
        loops = self._sums[training].shape[1]
        steps = max(self.state.max_steps, step + 1)  # Trainer may evaluate before training
        unrolling = draw_unrolling(self.objective, loops, self.args.seed, step, steps) if training else None
        found = model(**inputs, loop_losses=True, unrolling=unrolling, teacher=self._teacher)
        self._add(found, self._sums[training][:, : loops if unrolling is None else unrolling.loops])
        if not found.cross_entropy.shape[1]:
            loss = self._nothing(found, num_items_in_batch if training else 1)
        elif training or not self.objective.is_custom:
            halts = found.halt_logits, step, found.detached_halt_logits
            loss = self._minimised(LoopLosses(found.cross_entropy, *halts, steps))
        else:
            loss = found.cross_entropy[-1].mean()
        if num_items_in_batch is not None:
            loss = loss * found.cross_entropy.shape[1] / num_items_in_batch
            if self.args.average_tokens_across_devices:
                loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, found) if return_outputs else loss

    def _nothing(self, found: LoopedOutput, num_items_in_batch: Any) -> Tensor:
        """The loss of a part without labels: zero, with gradients if other parts of its step have gradients."""
        if not num_items_in_batch:
            raise UserError("No label of a whole step counts: all are -100; leave such rows out of the data.")
        parts = [found.cross_entropy, found.halt_logits if self.objective.name in GATED else None]
        return sum((part.sum() for part in parts if part is not None), torch.zeros((), device=self.args.device))

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip a gate whose gradient does not reach the trunk separately, unless its weights are sharded."""
        whole = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        channels = self.objective.channels
        if channels is None or channels.gradient > 0 or self.accelerator.distributed_type not in whole:
            return super()._clip_grad_norm(model)
        own: Any = _without_adapters(self.model).looped.gate
        gate = set(own.parameters())
        rest = [parameter for parameter in model.parameters() if parameter not in gate]
        norm = self.accelerator.clip_grad_norm_(rest, self.args.max_grad_norm)  # unscales all gradients
        nn.utils.clip_grad_norm_(gate, self.args.max_grad_norm)
        return norm

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        """Evaluate losses only: the logits of every loop would be too large."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, found = self.compute_loss(model, self._prepare_inputs(inputs), return_outputs=True)
        tokens = found.cross_entropy.shape[1]
        self._evaluated += torch.stack((loss.double() * tokens, loss.new_tensor(tokens).double())).cpu()
        return loss.detach(), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Average the evaluation loss over tokens; transformers averages over batches."""
        self._sums[False] = self._no_sums()
        self._evaluated.zero_()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        loss, tokens = self.accelerator.reduce(self._evaluated.float().to(self.args.device), "sum").tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = loss / tokens
        output.metrics.update(self._by_loop(False, f"{metric_key_prefix}_"))
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs |= self._by_loop(True, "")
        super().log(logs, *args, **kwargs)

    def _by_loop(self, training: bool, prefix: str) -> dict[str, float]:
        """The means over the tokens of all processes since the last report."""
        found = self.accelerator.reduce(self._sums[training], "sum").tolist()
        self._sums[training] = self._no_sums()
        metrics = {}
        for loop, (tokens, loss, correct, exits) in enumerate(zip(*found, strict=True), start=1):
            if tokens:
                metrics[f"{prefix}loss_loop_{loop}"] = loss / tokens
                metrics[f"{prefix}accuracy_loop_{loop}"] = correct / tokens
                if sum(found[3]):
                    metrics[f"{prefix}gate_exits_loop_{loop}"] = exits / tokens
        return metrics

    def _no_sums(self) -> Tensor:
        return torch.zeros(4, _without_adapters(self.model).num_loops, device=self.args.device)

    def _add(self, found: Any, sums: Tensor) -> None:
        """Add a batch to the sums of the loops that it ran; the last of them has losses."""
        losses = found.cross_entropy.detach().float()
        sums = sums[:, -len(losses) :]
        sums[0] += losses.shape[1]
        sums[1] += losses.sum(1)
        sums[2] += found.correct.sum(1)
        if found.halt_logits is not None:
            sums[3] += exit_weights(self.objective, found.halt_logits.detach().float()).sum(1)


class RejectMixedTexts(TrainerCallback):  # type: ignore[misc]
    """Reject TRL's packing that concatenates texts and cuts them into rows, for a `Trainer` with a looped model.

    The model cannot detect it: such a batch does not mark where a text begins.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        packs = getattr(args, "packing", False) or getattr(args, "eval_packing", False)
        if packs and args.packing_strategy == "wrapped" and isinstance(_without_adapters(model), LoopedForCausalLM):
            raise UserError(
                "packing_strategy='wrapped' lets tokens attend to other texts in their row; take 'bfd', which keeps "
                "texts apart, or leave out packing."
            )


def lora_config(model: Any, rank: int = 16, alpha: int = 32, **options: Any) -> Any:
    """PEFT's settings for adapters on every linear layer of a looped model but its head; the gate is trained whole.

    `options` are the options of PEFT's `LoraConfig`.
    """
    from peft import LoraConfig

    looped = _without_adapters(model).looped
    gate = getattr(looped, "gate", None)
    whole: Sequence[str] = [name for name, part in looped.named_modules() if gate is not None and part is gate]
    settings = {"task_type": "CAUSAL_LM", "target_modules": adaptable_layers(looped), "modules_to_save": whole or None}
    return LoraConfig(r=rank, lora_alpha=alpha, **{**settings, **options})


def _without_adapters(model: Any) -> LoopedForCausalLM:
    """The looped model inside PEFT's adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _as_objective(given: Objective | str | UserFunction) -> Objective:
    """The objective of a `LoopTrainer`, given by name, as settings or as a function."""
    if isinstance(given, Objective):
        return given if given.is_custom else with_source(given)
    return build(Objective, {"name": given}, "objective") if isinstance(given, str) else custom_objective(given)
