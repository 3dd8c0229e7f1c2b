"""How does a request's depth reach the model, and how do the loops of its tokens reach its answer and `/metrics`?

vLLM lets logits processors check the arguments of a request, and returns their error (HTTP 400). So `DepthArguments` is
a logits processor that only checks, and changes no logits.

vLLM runs its scheduler, its workers and its API servers in separate processes. Only KV connectors carry data between
them for every request and step: this connector transfers no keys and values. The scheduler's side tells the workers
each request's first cache block and its depth. The first worker's side reports the loops of every token. The scheduler
adds them to the request's answer (`kv_transfer_params`), and the API server counts them.

Shapes: N requests of a step.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as SecondRunnersProcessor

from loopscope.integrations.vllm.deployment import KEY, Deployment
from loopscope.integrations.vllm.request_depth import Depth, check_depth, requested_depth
from loopscope.integrations.vllm.step_batch import StepBatch

Integers = NDArray[np.int64]


class DepthArguments(LogitsProcessor, SecondRunnersProcessor):
    """Check the depth arguments of requests, for both of vLLM's model runners."""

    deployment: ClassVar[Deployment | None] = None  # the last deployment that this process checked

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        assert cls.deployment is not None
        check_depth(sampling_params.extra_args, cls.deployment)

    def is_argmax_invariant(self) -> bool:
        return True

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def apply(self, logits: Tensor, *_: Any) -> Tensor:
        return logits


@dataclass
class StepRequest:
    """Hold a request that begins, or begins again after vLLM freed its cache."""

    name: str
    tokens: int  # tokens that it reads before it generates
    depth: Depth


@dataclass
class BegunRequests(KVConnectorMetadata):
    """Carry the requests that begin in a step from the scheduler to the workers."""

    by_block: dict[int, StepRequest] = field(default_factory=dict)  # by the first block of their cache


@dataclass
class TokenLoops(KVConnectorWorkerMetadata):
    """Carry the loops of the token that each request generated in a step to the scheduler."""

    by_request: dict[str, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self  # only the first worker reports them


class LoopCounts(KVConnectorStats):
    """Count tokens by the loop at which they exited, and steps by the loops that they ran."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {"tokens": {}, "steps": {}}

    def is_empty(self) -> bool:
        return not self.data.get("steps")

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name in ("tokens", "steps"):
            self.data[name] = dict(Counter(self.data[name]) + Counter(other.data[name]))
        return self

    def reduce(self) -> dict[str, int | float]:
        tokens = {int(loops): count for loops, count in self.data["tokens"].items()}
        written = sum(tokens.values())
        average = sum(loops * count for loops, count in tokens.items()) / max(1, written)
        return {"tokens": written, "loops per token": round(average, 3)}


class LoopMetrics(KVConnectorPromMetrics):
    """Report loops in `/metrics`, by model and engine; vLLM removes its metrics before it starts another engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labels: dict[int, list[object]]):
        super().__init__(vllm_config, metric_types, labelnames, labels)
        depth = vllm_config.kv_transfer_config.kv_connector_extra_config["loops"]
        buckets = [float(loops) for loops in range(1, depth + 1)]
        self._histograms = {
            name: create_metric_per_engine(
                self._histogram_cls(
                    name=f"vllm:loopscope_loops_per_{unit}", documentation=words, buckets=buckets, labelnames=labelnames
                ),
                labels,
            )
            for name, unit, words in (
                ("tokens", "token", "Loops after which a token that was written exited."),
                ("steps", "step", "Loops that a step of the engine ran: those of its deepest token."),
            )
        }
        exits = self._counter_cls(
            name="vllm:loopscope_exits", documentation="Tokens that exited at a loop.", labelnames=[*labelnames, "loop"]
        )
        self._exits = {
            engine: {loop: exits.labels(*values, str(loop)) for loop in range(1, depth + 1)}
            for engine, values in labels.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, histograms in self._histograms.items():
            for loops, count in transfer_stats_data[name].items():
                for _ in range(count):
                    histograms[engine_idx].observe(int(loops))
        for loops, count in transfer_stats_data["tokens"].items():
            self._exits[engine_idx][int(loops)].inc(count)


@dataclass
class RunningRequest:
    """Hold the scheduler's data about a request until the request ends."""

    prompt_tokens: int
    depth: Depth
    loops: list[int] = field(default_factory=list)  # one per token, also in its answer


class LoopScopeConnector(KVConnectorBase_V1, SupportsHMA):
    """Carry depths to the workers and loops back; the scheduler and each worker have one."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._default = vllm_config.kv_transfer_config.kv_connector_extra_config["default"]
        self._running: dict[str, RunningRequest] = {}  # scheduler
        self._ended: dict[str, tuple[list[int], int]] = {}  # scheduler: in this step; loops, tokens
        self._begun: dict[int, StepRequest] = {}  # worker: the last request that began at a block
        self._reported: dict[str, int] = {}  # worker: the loops of this step's tokens, by request
        self._counts: LoopCounts | None = None

    # In the workers.

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, BegunRequests)
        self._begun |= connector_metadata.by_block

    def requests(self, batch: StepBatch) -> list[StepRequest]:
        """[N] the requests of a step."""
        return [self._begun[block] for block in batch.first_blocks.tolist()]

    def report(self, batch: StepBatch, exits: Integers, ran: int) -> None:
        """Record a step that ran `ran` loops, and the loops [N] at which its requests' last tokens exited."""
        if not get_tp_group().is_first_rank:
            return
        for request, length, loops in zip(self.requests(batch), batch.lengths, exits.tolist(), strict=True):
            if length >= request.tokens:  # else a part of a prompt, which generates nothing
                self._reported[request.name] = loops
        tokens = Counter(str(loops) for loops in self._reported.values())
        self._counts = LoopCounts({"tokens": dict(tokens), "steps": {str(ran): 1}})

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        counts, self._counts = self._counts, None
        return counts

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        reported, self._reported = self._reported, {}
        return TokenLoops(reported) if reported else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    # In the scheduler.

    def on_new_request(self, request: Any) -> None:
        depth = requested_depth(request.sampling_params.extra_args)
        self._running[request.request_id] = RunningRequest(request.num_prompt_tokens, depth)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        begun = BegunRequests()
        for new in scheduler_output.scheduled_new_reqs:  # the second runner restarts requests as new
            tokens = len(new.prefill_token_ids or new.prompt_token_ids)
            begun.by_block[new.block_ids[0][0]] = StepRequest(new.req_id, tokens, self._running[new.req_id].depth)
        others = scheduler_output.scheduled_cached_reqs
        for name, blocks, written in zip(others.req_ids, others.new_block_ids, others.num_output_tokens, strict=True):
            if name in others.resumed_req_ids:
                tokens = self._running[name].prompt_tokens + written
                begun.by_block[blocks[0][0]] = StepRequest(name, tokens, self._running[name].depth)
        return begun

    def update_connector_output(self, connector_output: Any) -> None:
        """Runs after `request_finished` of requests that ended in this step, before their answers are sent."""
        reported = connector_output.kv_connector_worker_meta
        for name, loops in ({} if reported is None else reported.by_request).items():
            if name in self._running:
                self._running[name].loops.append(loops)
            elif name in self._ended:
                known, tokens = self._ended[name]
                known += [loops][: tokens - len(known)]
        self._ended.clear()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        known = self._running.pop(request.request_id)
        self._ended[request.request_id] = known.loops, request.num_output_tokens
        return False, {KEY: {"depth": self._default if known.depth is None else known.depth, "loops": known.loops}}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # In the API servers.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return LoopCounts(data or {"tokens": {}, "steps": {}})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return LoopMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
