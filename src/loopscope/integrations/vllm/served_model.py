"""How does vLLM run a looped model? All tokens of a step run all loops; with policies, until every request has exited.

With policies, each request has its own `ExitPolicy`, which decides after each loop as in LoopScope's engine, with the
cache mode `propagate`. A token that continues a text exits alone, and its keys and values of that loop stand in for the
deeper loops. A prompt runs all loops, and its last token is read at its exit loop. A step ends when no request
continues.

Shapes: N requests of a step, P its tokens, n of them, D width, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from loopscope.engine.exit_decision import ExitDecision
from loopscope.errors import UserError
from loopscope.integrations.vllm.deployment import deployment_of
from loopscope.integrations.vllm.exits_log import ExitsLog
from loopscope.integrations.vllm.looped_decoder import ParallelDecoder
from loopscope.integrations.vllm.request_depth import Depth, policy_of
from loopscope.integrations.vllm.step_batch import ExitCache, StepBatch, current_batch
from loopscope.models.device import upload

Integers = NDArray[np.int64]
_logger = init_logger("vllm.loopscope")


class ServedModel(nn.Module):
    """Serve a looped decoder with its head in vLLM."""

    allow_patterns_overrides: ClassVar[list[str]] = ["model*.safetensors"]
    """The weights; a folder may hold other tensors, for example those of a policy's gate."""
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
        if self.deployment.adaptive:  # as `DeploymentChecks` set it
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
        first = get_tp_group().is_first_rank
        self._log = ExitsLog(log) if log is not None and first else None
        self._decisions: dict[Depth, ExitDecision] = {}  # by the requested depth
        if first:
            _logger.info("LoopScope: %s.", self.deployment)

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
        if not self.deployment.adaptive:
            return self.model(input_ids, positions)
        batch = current_batch(str(self.looped_attention[0].attn[0].layer_name))
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if batch is None or connector is None or not connector.has_connector_metadata():  # vLLM warms up
            return self.model.forward(input_ids, positions)  # compiles the shared block only
        decisions = self._admitted([request.depth for request in connector.requests(batch)])
        step = _AdaptiveStep(self, decisions, batch, input_ids, positions)
        hidden = step.run()
        connector.report(batch, step.exits, step.ran)
        if self._log is not None:
            self._log.note(batch, input_ids.cpu().numpy(), step.exits, step.ran)
        return hidden

    def _admitted(self, depths: Sequence[Depth]) -> list[ExitDecision]:
        """The decisions for the requests of a step, by their depths [N]."""
        rows: dict[Depth, list[int]] = {}
        for row, depth in enumerate(depths):
            rows.setdefault(depth, []).append(row)
        for depth, those in rows.items():
            if depth not in self._decisions:
                self._decisions[depth] = ExitDecision(self.model, policy_of(depth, self.deployment))
            self._decisions[depth].admit(np.array(those))
        return [self._decisions[depth] for depth in rows]

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


class _AdaptiveStep:
    """Run one step of vLLM under exit policies."""

    def __init__(
        self,
        model: ServedModel,
        decisions: Sequence[ExitDecision],
        batch: StepBatch,
        input_ids: Tensor,
        positions: Tensor,
    ) -> None:
        self._model, self._decoder, self._decisions, self._batch = model, model.model, decisions, batch
        self._positions, self._device = positions, positions.device
        self._last = batch.ends - 1  # [N] the token of each request that its policy reads
        self._at_prompt = np.flatnonzero(batch.prefilling)
        self._decoding = np.flatnonzero(~batch.prefilling)
        self._cache = ExitCache(len(positions), self._uploaded(self._last[self._decoding]))
        self._hidden = self._embedded = self._decoder.begin(input_ids, positions)  # [P, D] the states of all tokens
        self._read: list[tuple[Tensor, Tensor]] = []  # tokens of prompts, and their states at their exit
        self.exits: Integers = np.zeros(len(batch.ends), dtype=np.int64)  # [N]
        self.ran = 0

    def run(self) -> Tensor:
        """[P, D] the head's input: for every request the state at which its last token exits."""
        depth = self._decoder.num_loops
        while self.ran < depth and (not self.exits.all() or len(self._at_prompt)):
            self._advance()
            deciding = [decision for decision in self._decisions if len(decision.rows)]
            if self.ran == depth and deciding:
                self._leave(deciding, [np.ones(len(decision.rows), dtype=bool) for decision in deciding])
            elif deciding := [decision for decision in deciding if decision.first_exit <= self.ran < depth]:
                self._leave(deciding, self._stops(deciding))
        for attention in self._model.looped_attention:
            attention.propagate(range(self.ran, depth), self._cache)
        return self._decoder.read(self._head_states(), self._positions)

    def _advance(self) -> None:
        """Run one loop of the running tokens."""
        given = (self._cache.taken(values) for values in (self._hidden, self._embedded, self._positions))
        self._hidden = self._cache.put(self._hidden, self._decoder.loop(*given, self.ran, self._cache))
        self.ran += 1

    def _stops(self, deciding: Sequence[ExitDecision]) -> list[NDArray[np.bool_]]:
        """Decide which of the undecided requests exit now; the first worker decides for all."""
        rows = [decision.rows for decision in deciding]
        bounds = np.cumsum([0, *(len(part) for part in rows)])
        last = self._uploaded(self._last[np.concatenate(rows)])
        logits = self._logits(last) if any(decision.reads_logits for decision in deciding) else None
        workers = get_tp_group()
        stops = torch.zeros(bounds[-1], dtype=torch.uint8, device=self._device)
        if workers.is_first_rank:
            for decision, (first, end) in zip(deciding, pairwise(bounds.tolist()), strict=True):
                own = None if logits is None or not decision.reads_logits else logits[first:end]
                found = decision.exits(np.full(end - first, self.ran), own, partial(self._pooled, last[first:end]))
                stops[first:end] = torch.from_numpy(found.astype(np.uint8))
        if workers.world_size > 1:
            workers.broadcast(stops, src=0)
        return np.split(stops.cpu().numpy().astype(bool), bounds[1:-1])

    def _logits(self, last: Tensor) -> Tensor:
        """[n, V] the logits of these tokens, as if they exited now."""
        if self._model.deployment.head_attends:
            read = self._decoder.read(self._head_states(), self._positions).index_select(0, last)
        else:
            read = self._decoder.read(self._hidden.index_select(0, last), self._positions.index_select(0, last))
        logits = self._model.compute_logits(read)
        assert logits is not None
        return logits

    def _pooled(self, last: Tensor) -> Tensor:
        """[n, D] the pooled states of these tokens, which the gate reads."""
        return self._decoder.pooled(self._hidden.index_select(0, last))

    def _leave(self, deciding: Sequence[ExitDecision], stops: Sequence[NDArray[np.bool_]]) -> None:
        """Let requests exit: a token that continues a text stops running; a prompt is read here and runs on."""
        gone = np.concatenate([decision.keep(~stop) for decision, stop in zip(deciding, stops, strict=True)])
        if not len(gone):
            return
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
        """[P, D] the states at which every request is read, or would be read now."""
        hidden = self._hidden
        for tokens, states in self._read:
            hidden = hidden.index_copy(0, tokens, states)
        return hidden

    def _uploaded(self, values: Integers) -> Tensor:
        return upload(values, self._device)
