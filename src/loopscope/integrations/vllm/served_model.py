"""How does vLLM run a looped model? All tokens of a step through all loops; or, with a policy, until nobody goes on.

With a policy every request is asked after each loop, by the same `ExitPolicy` and its state as in LoopScope's engine,
and the rules are those of its cache `propagate`: a token that continues a text exits alone, and its keys and values of
that loop stand in for the deeper ones; a prompt goes through all loops, whatever its last token says, which is read
where that one exits. A step ends as soon as nobody goes on.

Shapes: N requests of a step, P its tokens, n of them, D width, V vocabulary.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from loopscope.engine.exit_decision import ExitDecision
from loopscope.errors import UserError
from loopscope.integrations.vllm.deployment import deployment_of
from loopscope.integrations.vllm.exits_log import ExitsLog
from loopscope.integrations.vllm.looped_decoder import ParallelDecoder
from loopscope.integrations.vllm.step_batch import ExitCache, StepBatch, current_batch
from loopscope.models.device import upload

Integers = NDArray[np.int64]


class ServedModel(nn.Module):
    """A looped decoder with a head, as vLLM wants it."""

    allow_patterns_overrides: ClassVar[list[str]] = ["model*.safetensors"]
    """The weights; a folder may hold others, those of a policy's gate for instance."""
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.deployment = deployment_of(vllm_config)
        if self.deployment.policy is not None:  # as `DeploymentChecks` left it
            assert not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
            assert not vllm_config.cache_config.enable_prefix_caching
            assert not (self.deployment.head_attends and vllm_config.scheduler_config.enable_chunked_prefill)
        config = self.deployment.config
        name = maybe_prefix(prefix, "model")
        self.model: Any = ParallelDecoder(vllm_config=vllm_config, prefix=name, deployment=self.deployment)
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.looped_attention: list[Any] = [layer.self_attn for layer in self.model.core]
        self.logits_processor = LogitsProcessor(config.vocab_size)
        log = self.deployment.exits_log
        self._log = ExitsLog(log) if log is not None and get_tp_group().is_first_rank else None

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        if inputs_embeds is not None:
            raise UserError("A looped model takes prompts as tokens or text, not as embeddings.")
        policy = self.deployment.policy
        batch = None if policy is None else current_batch(str(self.looped_attention[0].attn[0].layer_name))
        if policy is None:
            return self.model(input_ids, positions)
        if batch is None:
            return self.model.forward(input_ids, positions)  # which compiles the shared block only
        step = _AdaptiveStep(self, ExitDecision(self.model, policy), batch, input_ids, positions)
        hidden = step.run()
        if self._log is not None:
            self._log.note(batch, input_ids.cpu().numpy(), step.exits, step.ran)
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


class _AdaptiveStep:
    """A step with a policy."""

    def __init__(
        self, model: ServedModel, group: ExitDecision, batch: StepBatch, input_ids: Tensor, positions: Tensor
    ) -> None:
        self._model, self._decoder, self._group, self._batch = model, model.model, group, batch
        self._positions, self._device = positions, positions.device
        self._last = batch.ends - 1  # [N] the token of each request that is asked
        self._at_prompt = np.flatnonzero(batch.prefilling)
        self._decoding = np.flatnonzero(~batch.prefilling)
        self._cache = ExitCache(len(positions), self._uploaded(self._last[self._decoding]))
        self._hidden = self._embedded = self._decoder.begin(input_ids, positions)  # [P, D] the states of all tokens
        self._read: list[tuple[Tensor, Tensor]] = []  # tokens of prompts, and their states where these are read
        self.exits: Integers = np.zeros(len(batch.ends), dtype=np.int64)  # [N]
        self.ran = 0
        group.admit(np.arange(len(batch.ends)))

    def run(self) -> Tensor:
        """[P, D] what the head reads: of every request where its last token exits."""
        depth = self._decoder.num_loops
        while self.ran < depth and (len(self._group.rows) or len(self._at_prompt)):
            self._advance()
            if self.ran == depth:
                self._leave(np.ones(len(self._group.rows), dtype=bool))
            elif len(self._group.rows):
                self._leave(self._stops())
        for attention in self._model.looped_attention:
            attention.propagate(range(self.ran, depth), self._cache)
        return self._decoder.read(self._head_states(), self._positions)

    def _advance(self) -> None:
        """One loop of the tokens that run."""
        given = (self._cache.taken(values) for values in (self._hidden, self._embedded, self._positions))
        self._hidden = self._cache.put(self._hidden, self._decoder.loop(*given, self.ran, self._cache))
        self.ran += 1

    def _stops(self) -> NDArray[np.bool_]:
        """Who of those that are asked exits now; the first worker decides for all."""
        rows, last = self._group.rows, self._uploaded(self._last[self._group.rows])
        logits = None
        if self._group.reads_logits:
            if self._model.deployment.head_attends:
                read = self._decoder.read(self._head_states(), self._positions).index_select(0, last)
            else:
                read = self._decoder.read(self._hidden.index_select(0, last), self._positions.index_select(0, last))
            logits = self._model.compute_logits(read)
        workers = get_tp_group()
        stops = torch.zeros(len(rows), dtype=torch.uint8, device=self._device)
        if workers.is_first_rank:
            found = self._group.exits(
                np.full(len(rows), self.ran), logits, lambda: self._decoder.pooled(self._hidden.index_select(0, last))
            )
            stops = torch.from_numpy(found.astype(np.uint8)).to(self._device)
        if workers.world_size > 1:
            workers.broadcast(stops, src=0)
        return stops.cpu().numpy().astype(bool)

    def _leave(self, stops: NDArray[np.bool_]) -> None:
        """Those who exit; what continues a text runs no further, a prompt is read here and goes on."""
        if not stops.any():
            return
        gone = self._group.keep(~stops)
        self.exits[gone] = self.ran
        read = gone[self._batch.prefilling[gone]]
        if len(read) and self.ran < self._decoder.num_loops:
            whole = self._model.deployment.head_attends
            tokens = self._uploaded(self._batch.tokens(read) if whole else self._last[read])
            self._read.append((tokens, self._hidden.index_select(0, tokens)))
        left = self.exits[self._decoding] > 0
        if left.any():
            running = np.concatenate((self._batch.tokens(self._at_prompt), self._last[self._decoding[~left]]))
            self._cache.leave(self._uploaded(np.sort(running)), self._uploaded(np.flatnonzero(left)))

    def _head_states(self) -> Tensor:
        """[P, D] the states in which every request is read, or would be now."""
        hidden = self._hidden
        for tokens, states in self._read:
            hidden = hidden.index_copy(0, tokens, states)
        return hidden

    def _uploaded(self, values: Integers) -> Tensor:
        return upload(values, self._device)
