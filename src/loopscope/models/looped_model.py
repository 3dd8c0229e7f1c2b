"""What is a looped model? The contract that a model must keep to be recorded, diagnosed and run adaptively.

Four methods: `embed` (tokens -> state), `step` (the shared block, once), `predict` (state -> logits) and `halt`
(state -> halt logit, if it has a gate). The rows of a state are independent: LoopScope takes rows out, and joins them
with rows at other loops, because the block is the same at every depth.

A model declares its other abilities: `kv_cache` (its tokens attend to cached tokens, so it can generate text),
`branches` (a row may end in several continuations, the choices of a question), `causal` (a token sees no later token).
LoopScope rejects uses that a model does not declare, and `check_model` compares the declared ones with the plain pass.

`SimpleLoopedModel` adapts a network that takes padded batches.

Shapes: B rows, M tokens of the longest row, P tokens of all rows, S their states, T loops, D width, V vocabulary.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from loopscope.errors import UserError, reason
from loopscope.model_identity import with_configuration
from loopscope.models.attention import attending
from loopscope.models.device import upload
from loopscope.models.kv_cache import CachedRows
from loopscope.models.linear import Int8Linear, keep_outside
from loopscope.models.packing import Layout, share_prefixes


@dataclass(frozen=True)
class LoopState:
    """Hold the packed rows of a batch, each at its own loop: the tokens of a row are neighbours, without padding.

    A model may add its own tensors: [B], or [P, ...] by token (named in `tokenwise`).
    """

    hidden: Tensor  # [S, D] the input of the next loop
    layout: Layout  # the places of the rows in it
    loop: Tensor  # [B] loops applied so far

    tokenwise: ClassVar[tuple[str, ...]] = ("hidden",)

    @property
    def lengths(self) -> Tensor:
        """[B] tokens of each row."""
        return self.layout.lengths

    def take(self, rows: Tensor | NDArray[Any]) -> Self:
        """The rows at these indices (or where this mask is true), in this order."""
        chosen = rows if isinstance(rows, np.ndarray) else rows.cpu().numpy()
        numbers = np.arange(len(self.loop))[chosen]
        layout, tokens = self.layout.take(numbers)
        index = upload(numbers, self.loop.device)
        tensors = {}
        for name in self._tensors():
            tensors[name] = getattr(self, name).index_select(0, tokens if name in self.tokenwise else index)
        return type(self)(layout=layout, **tensors)

    @classmethod
    def join(cls, states: Sequence[Self]) -> Self:
        """Join the rows of `states`, in this order."""
        states = [state if state.layout.sharing is None else state.take(np.arange(len(state.loop))) for state in states]
        tensors = {name: torch.cat([getattr(state, name) for state in states]) for name in cls._tensors()}
        return cls(layout=Layout.join([state.layout for state in states]), **tensors)

    @classmethod
    def _tensors(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.name != "layout"]

    def at(self, positions: Tensor | None) -> Tensor:
        """The hidden states [B, D] at one position a row, or [S, D] of all tokens."""
        return self.hidden if positions is None else self.hidden.index_select(0, self.layout.states_at(positions))

    def with_cache(self, cache: CachedRows | None) -> Self:
        """The same rows, after tokens with cached keys and values."""
        return replace(self, layout=self.layout.with_cache(cache))


@dataclass(frozen=True)
class InjectedState(LoopState):
    """Hold also the prelude's output, for a model that reads it in every loop."""

    embedded: Tensor  # [S, D]

    tokenwise: ClassVar[tuple[str, ...]] = ("hidden", "embedded")


@dataclass(frozen=True)
class Loops:
    """Hold the outputs of `LoopedModel.loops` at every loop: of every token, or (without M) of one per row."""

    logits: Tensor  # [T, B, M, V]
    hidden: Tensor  # [T, B, M, D] the pooled states r_t
    gate_logits: Tensor | None  # [T, B, M]


class LoopedModel(nn.Module):
    """Serve as the base of every looped model: embed tokens, apply the shared block, read the state.

    A subclass sets `num_loops`, `block_size` and `vocab_size`, and defines `embed`, `step` and `predict`. A subclass
    with a gate also defines `halt`. A subclass also declares its capabilities (`kv_cache`, `branches`, `causal`), and
    `check_model` tests these capabilities against a plain pass. For a network that takes padded batches,
    `SimpleLoopedModel` needs less code.

    Shapes: B rows, M tokens of the longest row, S states of all tokens, T loops, D width, V vocabulary.

    Examples
    --------
    >>> outputs = model.loops(torch.tensor([[1, 2, 3]]))
    >>> outputs.logits.shape  # [T, B, M, V]
    torch.Size([4, 1, 3, 8])
    """

    num_loops: int
    """T, the number of loops for which the model was trained."""
    block_size: int
    """The maximum length of a row in tokens."""
    vocab_size: int
    head_attends: bool = False
    """Whether `head_input` attends to other tokens; then LoopScope computes it for all tokens."""
    embed_cost: float = 0.0
    head_cost: float = 0.0
    """The cost of `embed` and `head_input` in loops: layers of prelude and coda, divided by layers of the core."""
    tied: Mapping[str, str] = MappingProxyType({})
    """Tensors that equal another tensor, so that a checkpoint may omit them."""
    causal: ClassVar[bool] = True
    """Whether a token's state depends only on tokens up to it; then rows with a common prefix can share states."""
    kv_cache: ClassVar[bool] = False
    """Whether tokens attend to the cached keys and values in `layout.cache`, through `cached_attention` in every
    attention layer."""
    branches: ClassVar[bool] = False
    """Whether each branch of a row (`layout.host_branches`) sees only the trunk and itself, not the other branches."""
    any_depth: ClassVar[bool] = True
    """Whether the model can run more loops than `num_loops`; False if the model has weights for each loop."""
    gradient_checkpointing: bool = False
    """Whether the backward pass runs each loop again, so that the states inside the loop need no memory."""
    unneeded: tuple[str, ...] = ()
    """Endings of the names of tensors that a checkpoint may have although they follow from other tensors."""

    _identity: tuple[list[Any], str | Callable[[], str]] | None = None
    """A fingerprint of the tensors, with their hash or with a function that computes the hash."""

    @property
    def weights_sha256(self) -> str:
        """Return the hash that identifies this model: the hash of its file, or of its parameters.

        A model with changed parameters or a different precision has a different hash.
        """
        if not self.is_identified:
            self.identify_by(lambda: tensors_sha256(self._stored_tensors()))
        assert self._identity is not None
        fingerprint, known = self._identity
        if not isinstance(known, str):
            self._identity = (fingerprint, known := known())
        return with_configuration(known, self.configuration_sha256)

    @property
    def configuration_sha256(self) -> str | None:
        """Return the hash of the configuration; None if the model has no configuration."""
        return None

    @property
    def precision(self) -> str:
        """Return the precision of the weights, such as "int8"; with torchao, also the class of the weights."""
        if any(isinstance(layer, Int8Linear) for layer in self.modules()):
            return "int8"
        kinds = {type(weight.data).__name__ for weight in self.parameters() if is_traceable_wrapper_subclass(weight)}
        plain = next(self.parameters()).dtype
        return " with ".join((str(plain).removeprefix("torch."), *sorted(kinds)))

    @property
    def is_identified(self) -> bool:
        """Tell whether the weights are unchanged since the call of `identify_by`."""
        return self._identity is not None and self._identity[0] == self._fingerprint()

    def identify_by(self, hashed: Callable[[], str]) -> None:
        """Set the function that hashes the current weights; LoopScope calls this function when the hash is needed.

        Parameters
        ----------
        hashed
            A function that returns the hash of the current weights.
        """
        self._identity = (self._fingerprint(), hashed)

    def _fingerprint(self) -> list[Any]:
        """The sum of every tensor's bits, and some of its numbers: quick, exact, and the same on every device.

        PyTorch's own counts of changes miss a fused optimizer's.
        """
        fingerprint: list[Any] = []
        for name, tensor in self._stored_tensors():
            bits = tensor.detach().flatten().view(_BITS[tensor.element_size()])
            some = bits[:: max(1, len(bits) // SAMPLED_WEIGHTS)]
            fingerprint.append((name, tensor.dtype, tensor.shape, int(bits.sum(dtype=torch.int64)), some.tolist()))
        return fingerprint

    def _stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `state_dict`, in its order, module by module: only one module at a time is unpacked."""
        for name, module in self.named_modules(remove_duplicate=False):
            held: dict[str, Tensor] = {}
            module._save_to_state_dict(held, f"{name}." if name else "", keep_vars=False)
            for key, tensor in held.items():
                yield from plain_tensors(key, tensor)

    def compile(self, **options: Any) -> None:
        """Compile `step` with torch.compile, as one graph; attention stays uncompiled.

        PyTorch compiles during the first loops, which therefore take long.

        Parameters
        ----------
        **options
            Options of torch.compile, such as `backend`.

        Examples
        --------
        >>> model.compile(backend="eager")
        >>> model.loops(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([4, 1, 3, 8])
        """
        keep_outside(self)
        limits = torch._dynamo.config  # each model of a class has up to five graphs: for one row, one token, and more
        limits.recompile_limit = max(limits.recompile_limit, MAX_GRAPHS)
        compiled = torch.compile(type(self).step, fullgraph=True, dynamic=True, **options)

        def step(state: LoopState) -> LoopState:
            with attending(state.layout) as outside:
                try:
                    done: LoopState = compiled(self, replace(state, layout=outside))
                except torch._dynamo.exc.TorchDynamoException as error:
                    raise UserError(
                        f"The model cannot be compiled here ({reason(error)[:300]}); run it without --compile."
                    ) from error
            return replace(done, layout=state.layout)

        self.step = step  # type: ignore[method-assign]

    def __getstate__(self) -> dict[str, Any]:
        """Copy or pickle the model without its compiled step."""
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    @abstractmethod
    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        """Compute the state before the first loop.

        Parameters
        ----------
        tokens
            [S] the tokens of all rows, one row after the other.
        layout
            The places of the rows in the state.

        Returns
        -------
        LoopState
            The state before the first loop.
        """

    @abstractmethod
    def step(self, state: LoopState) -> LoopState:
        """Run one loop: apply the shared block once.

        Parameters
        ----------
        state
            The state of the selected rows, each at its own loop.

        Returns
        -------
        LoopState
            The state after one more loop.
        """

    def pooled(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
        """Return the state in the form that the head and the gate read.

        Parameters
        ----------
        state
            The state of the selected rows.
        positions
            [B] the position in each row to read (default: every token).

        Returns
        -------
        Tensor
            [B, D] states at the given positions, or [S, D] states of all tokens.
        """
        return state.at(positions)

    def head_input(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
        """Compute the input of `predict`: `pooled`, unless the model has more layers before its head.

        Parameters
        ----------
        state
            The state of the selected rows.
        positions
            [B] the position in each row to read (default: every token).

        Returns
        -------
        Tensor
            The input of the head, in the shape of `pooled`.
        """
        return self.pooled(state, positions)

    @abstractmethod
    def predict(self, head_input: Tensor) -> Tensor:
        """Compute logits from the input of the head.

        Parameters
        ----------
        head_input
            [..., D] the input of the head.

        Returns
        -------
        Tensor
            [..., V] logits.
        """

    def halt(self, pooled: Tensor) -> Tensor | None:
        """Compute halt logits from pooled states; a model without a gate returns None.

        Parameters
        ----------
        pooled
            [..., D] pooled states.

        Returns
        -------
        Tensor or None
            [...] halt logits.
        """
        return None

    def last_pooled(self, state: LoopState, positions: Tensor) -> Tensor | None:
        """Compute `pooled` after one more loop, and skip values that no later step reads.

        Parameters
        ----------
        state
            The state of the selected rows before their last loop.
        positions
            [B] the position in each row to read.

        Returns
        -------
        Tensor or None
            [B, D] states at the given positions; None if the model cannot omit any computation.
        """
        return None

    def early_pooled(self, state: LoopState, positions: Tensor) -> tuple[Tensor, LoopState] | None:
        """Compute `pooled` of the next loop before the loop is complete; rows that exit skip the rest of the loop.

        Parameters
        ----------
        state
            The state of the selected rows.
        positions
            [B] the position in each row to read.

        Returns
        -------
        tuple[Tensor, LoopState] or None
            [B, D] states, and the state from which `finish_step` continues; None if the model does not divide its
            loops.
        """
        return None

    def finish_step(self, begun: LoopState) -> LoopState:
        """Complete a loop that `early_pooled` began.

        Parameters
        ----------
        begun
            The state in the middle of the loop, for all rows or for some rows.

        Returns
        -------
        LoopState
            The state after the loop, as `step` returns it.
        """
        raise NotImplementedError

    def begin(self, tokens: Tensor, lengths: Tensor | None = None, share: bool = False) -> LoopState:
        """Compute the state of padded rows before the first loop.

        Parameters
        ----------
        tokens
            [B, M] tokens; LoopScope moves tokens on the CPU to the model's device.
        lengths
            [B] the length of each row (default: M).
        share
            If the model is causal, store common beginnings of rows only once.

        Returns
        -------
        LoopState
            The state before the first loop.

        Raises
        ------
        UserError
            If a row is longer than `block_size`.
        """
        rows, longest = tokens.shape
        lengths = torch.full((rows,), longest) if lengths is None else lengths
        assert lengths.shape == (rows,)
        device = next(self.parameters(), tokens).device
        shares = share and self.causal
        layout = share_prefixes(tokens, lengths, device) if shares else Layout(lengths.cpu().numpy(), device)
        return self.begin_packed(layout.pack(upload(tokens, device)), layout)

    def begin_packed(self, tokens: Tensor, layout: Layout) -> LoopState:
        """Compute the state of packed rows before the first loop.

        Parameters
        ----------
        tokens
            [S] the tokens of all rows, one row after the other.
        layout
            The places of the rows in the state.

        Returns
        -------
        LoopState
            The state before the first loop.

        Raises
        ------
        UserError
            If a row is longer than `block_size`, or if the layout needs a capability that the model does not declare.
        """
        if layout.cache is not None:
            self.require("kv_cache", "Rows after cached tokens")
        if layout.host_branches is not None:
            self.require("branches", "Questions with choices")
        self.check_length(layout.max_context)
        return self.embed(tokens, layout)

    def require_evaluation(self) -> None:
        """Reject a model in training mode, because dropout would change every answer.

        Raises
        ------
        UserError
            If the model is in training mode.
        """
        if self.training:
            raise UserError("The model is in training mode; call model.eval() before it is recorded, run or checked.")

    def require(self, capability: Literal["kv_cache", "branches", "causal"], what: str) -> None:
        """Reject a use for which the model does not declare the capability.

        Parameters
        ----------
        capability
            "kv_cache", "branches" or "causal".
        what
            A description of the use, for the error message.

        Raises
        ------
        UserError
            If the model does not declare the capability.
        """
        if not getattr(self, capability):
            raise UserError(
                f"{what} cannot be run with this model: {type(self).__name__} declares {_LACKING[capability]}; "
                "docs/how-to/your-model.md says how a model gets there."
            )

    def set_depth(self, loops: int) -> None:
        """Set the number of loops at full depth, which may differ from training.

        Parameters
        ----------
        loops
            The number of loops, at least 1.

        Raises
        ------
        UserError
            If the model cannot run this many loops, for instance because the model has separate weights for each loop.
        """
        trained, beyond = self.num_loops, f"The model was trained with {self.num_loops} loops and cannot run {loops}"
        if loops == trained:
            return
        if loops > trained and not self.any_depth:
            raise UserError(f"{beyond}: it has learned something for each loop (any_depth = False); ask for fewer.")
        self.num_loops = loops
        try:
            with torch.inference_mode():
                self.loops(torch.zeros((1, 1), dtype=torch.int64))
        except Exception as error:
            self.num_loops = trained
            raise UserError(f"{beyond} ({reason(error)}); ask for fewer.") from error

    def ideal_speedup(self, loops: float) -> float:
        """Compute the ideal speed-up of a token over full depth, counted in layers.

        Parameters
        ----------
        loops
            The average number of loops per token.

        Returns
        -------
        float
            The speed-up; layers before and after the loops count only once.
        """
        overhead = self.embed_cost + self.head_cost
        return (self.num_loops + overhead) / (loops + overhead)

    def check_length(self, length: int) -> None:
        """Reject rows that are too long for the model.

        Parameters
        ----------
        length
            The number of tokens in the longest row.

        Raises
        ------
        UserError
            If the length exceeds `block_size`.
        """
        if length > self.block_size:
            raise UserError(
                f"The examples have {length} tokens, but the model's block size is {self.block_size}; nothing is cut "
                "off, so choose shorter examples or a model with a larger block size."
            )

    def unroll(
        self, state: LoopState, num_loops: int | None = None, cache: Callable[[int], CachedRows | None] | None = None
    ) -> Iterator[LoopState]:
        """Run loops one after another, and yield the state after each loop.

        Parameters
        ----------
        state
            The state from which the loops continue.
        num_loops
            The number of loops (default: all).
        cache
            A function that takes a loop and returns the cached tokens that precede the rows (default: none).

        Returns
        -------
        Iterator[LoopState]
            The state after each loop.
        """
        for loop in range(1, 1 + (self.num_loops if num_loops is None else num_loops)):
            state = self._run_step(state if cache is None else state.with_cache(cache(loop)))
            yield state

    def _run_step(self, state: LoopState) -> LoopState:
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            return self.step(state)

        def step(hidden: Tensor) -> LoopState:
            return self.step(replace(state, hidden=hidden))

        return checkpoint(step, state.hidden, use_reentrant=False)  # draws the same random numbers again, if any

    def read(self, state: LoopState, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute `pooled` and `head_input`, which are the same tensor unless the head has attention layers.

        Parameters
        ----------
        state
            The state of the selected rows.
        positions
            [B] the position in each row to read (default: every token).

        Returns
        -------
        tuple[Tensor, Tensor]
            `pooled` and `head_input`, of the same shape.
        """
        pooled = self.pooled(state, positions)
        return pooled, self.head_input(state, positions) if self.head_attends else pooled

    def deepest(
        self, state: LoopState, num_loops: int, positions: Tensor | None = None, truncated: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run loops, and read only the state after the last loop.

        Parameters
        ----------
        state
            The state from which the loops continue.
        num_loops
            The number of loops to run.
        positions
            [B] the position in each row to read (default: every token).
        truncated
            The number of last loops through which gradients flow (default: all).

        Returns
        -------
        tuple[Tensor, Tensor]
            `pooled` and `head_input` after the last loop.
        """
        free = 0 if truncated is None else max(num_loops - truncated, 0)
        for loop in range(num_loops - 1):
            with torch.set_grad_enabled(torch.is_grad_enabled() and loop >= free):
                state = self._run_step(state)
        last = None if positions is None else self.last_pooled(state, positions)
        return self.read(self._run_step(state), positions) if last is None else (last, last)

    def loops(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        num_loops: int | None = None,
        positions: Tensor | None = None,
    ) -> Loops:
        """Compute the model's outputs at every loop.

        Parameters
        ----------
        tokens
            [B, M] tokens.
        lengths
            [B] the length of each row (default: M).
        num_loops
            The number of loops (default: all).
        positions
            [B] the position in each row to read (default: every token).

        Returns
        -------
        Loops
            Logits [T, B, M, V], pooled states [T, B, M, D] and halt logits [T, B, M]; with `positions`, all shapes are
            without M. Pooled states after the end of a row are zero.
        """
        depth = self.num_loops if num_loops is None else num_loops
        assert depth >= 1
        state = embedded = self.begin(tokens, lengths, share=True)
        outputs = []
        for state in self.unroll(embedded, depth - 1):
            outputs.append(self.read(state, positions))
        outputs.append(self.deepest(state, 1, positions))
        if positions is None:
            layout, longest = state.layout, tokens.shape[1]
            outputs = [(layout.unpack(pooled, longest), layout.unpack(read, longest)) for pooled, read in outputs]
        hidden, head_input = (torch.stack(each) for each in zip(*outputs, strict=True))
        return Loops(self.predict(head_input), hidden, self.halt(hidden))


MAX_GRAPHS = 64
"""The graphs of all compiled models of a class in a process; PyTorch's own limit is 8."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SAMPLED_WEIGHTS = 64
"""Numbers of every tensor that are compared first to detect a change."""
_LACKING = {
    "kv_cache": "no KV cache (kv_cache = True)",
    "branches": "no branches (branches = True)",
    "causal": "that it looks ahead (causal = False)",
}


def plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensor itself, or the plain tensors inside a quantised one, under names that include its kind."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    parts, settings = tensor.__tensor_flatten__()
    for part in parts:
        yield from plain_tensors(f"{name}.{type(tensor).__name__}({settings}).{part}", getattr(tensor, part))


def tensors_sha256(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The hash of tensors with their names, in this order; large models take a while."""
    sha256 = hashlib.sha256()
    for name, tensor in tensors:
        sha256.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        sha256.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def initial_loop_state(hidden: Tensor, layout: Layout) -> LoopState:
    """The state of rows before their first loop."""
    return LoopState(hidden, layout, torch.zeros_like(layout.lengths))


class SimpleLoopedModel(LoopedModel):
    """Adapt a network that takes padded batches: embed the tokens, apply the block, predict, and halt with a gate.

    LoopScope can record, diagnose and calibrate such a model, and run the model row by row. Text and questions with
    choices need a KV cache and branches; for such tasks, derive the class from `LoopedModel`.

    A subclass sets `num_loops`, `block_size` and `vocab_size`, and defines `embed_rows`, `block` and `predict`. A
    subclass with a gate also defines `halt`.

    Examples
    --------
    >>> class Counter(ls.SimpleLoopedModel):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.num_loops, self.block_size, self.vocab_size = 3, 8, 5
    ...         self.embedding, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5)
    ...     def embed_rows(self, tokens, mask):
    ...         return self.embedding(tokens)
    ...     def block(self, hidden, mask):
    ...         return torch.tanh(2 * hidden)
    ...     def predict(self, head_input):
    ...         return self.head(head_input)
    >>> len(ls.check_model(Counter().eval())) > 0
    True
    """

    causal = False  # the safe default: set it to True if a token sees no later token, so that states can be shared

    @abstractmethod
    def embed_rows(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Compute the hidden states before the first loop.

        Parameters
        ----------
        tokens
            [B, M] tokens.
        mask
            [B, M] a mask that is false at padding.

        Returns
        -------
        Tensor
            [B, M, D] hidden states.
        """

    @abstractmethod
    def block(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Run one loop; no token may attend to padding.

        Parameters
        ----------
        hidden
            [B, M, D] hidden states.
        mask
            [B, M] a mask that is false at padding.

        Returns
        -------
        Tensor
            [B, M, D] hidden states after the loop.
        """

    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        longest = layout.longest
        hidden = self.embed_rows(layout.unpack(tokens, longest), layout.mask(longest))
        return initial_loop_state(layout.pack(hidden), layout)

    def step(self, state: LoopState) -> LoopState:
        layout, longest = state.layout, state.layout.longest
        hidden = self.block(layout.unpack(state.hidden, longest), layout.mask(longest))
        return LoopState(layout.pack(hidden), layout, state.loop + 1)
