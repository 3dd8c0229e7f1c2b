"""Does a model keep the contract? These checks run it in several ways, and all results must agree.

Recording and engine rely on every line of `check_model`; it raises the first violation as a one-sentence `UserError`.

Shapes: B rows, S states of all rows, D width, V classes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.engine.generation import Prompt, stream
from loopscope.engine.requests import Request, choices, require_vocabulary
from loopscope.engine.scheduler import in_order, run
from loopscope.errors import UserError, reason
from loopscope.models.looped_model import LoopedModel, LoopState
from loopscope.policy import ExitPolicy
from loopscope.trajectory_checks import as_token_row

CheckKind = Literal["contract", "precision", "batch", "cache", "replay", "speed"]
CHECK_KINDS: tuple[CheckKind, ...] = get_args(CheckKind)
_MAX_TOKENS, _MAX_LOOPS = 24, 8
"""The limits of the check: tokens of a row, and loops."""
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_LOW_PRECISION = 0.05


class Check(msgspec.Struct, frozen=True):
    """Hold one line of a check: the measured value, its limit, and the verdict."""

    kind: CheckKind
    what: str
    measured: float | None
    unit: str
    limit: float | None  # None: shown, without a verdict
    passed: bool | None
    note: str = ""


def check_model(model: LoopedModel, rows: Sequence[NDArray[np.int64]] | None = None) -> list[Check]:
    """Check that a model keeps the contract: rows, loops, caches and branches must give the answers of a plain pass.

    Parameters
    ----------
    model
        A looped model in evaluation mode.
    rows
        Rows of tokens to check with (default: a few random rows of different lengths).

    Returns
    -------
    list[Check]
        The checks, each with the largest difference that was measured.

    Raises
    ------
    UserError
        If a check fails; the message says what to change.

    Examples
    --------
    >>> checks = ls.check_model(model)
    >>> all(check.measured < 1e-4 for check in checks)
    True
    """
    return list(contract_checks(model, rows))


@torch.inference_mode()
def contract_checks(model: LoopedModel, rows: Sequence[NDArray[np.int64]] | None = None) -> Iterator[Check]:
    """Yield the checks of `check_model` as they finish."""
    for name in ("num_loops", "block_size", "vocab_size"):
        value = getattr(model, name, None)
        whole = isinstance(value, int) and value >= 1
        _fail_unless(whole, f"The model must set self.{name} to a whole number from 1 on, but it is {value!r}.")
    model.require_evaluation()
    weights = next(model.parameters(), torch.empty(0))
    wrong = "The model has no parameters; make its modules attributes of it, so that PyTorch finds them."
    _fail_unless(weights.numel() > 0, wrong)
    if rows is not None:
        rows = [as_token_row(row, "A row to be checked with") for row in rows]
        known = all(0 <= row.min() <= row.max() < model.vocab_size for row in rows)
        _fail_unless(known, f"A row has a token outside the model's vocabulary (0..{model.vocab_size - 1}).")
    tokens = [torch.from_numpy(row).to(weights.device) for row in rows or _random_rows(model)]
    for check in _Contract(model, tokens, _TOLERANCE.get(weights.dtype, _LOW_PRECISION)).checks:
        try:
            yield check()
        except (UserError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            name = check.__name__.replace("_", " ")
            raise UserError(f"The model fails in the check of '{name}' ({reason[:200]}).") from error


def _fail_unless(holds: bool, wrong: str) -> None:
    """Raise `wrong` as a UserError unless the line of the contract holds."""
    if not holds:
        raise UserError(wrong)


def _random_rows(model: LoopedModel) -> list[NDArray[np.int64]]:
    """Random rows of tokens of different lengths, two of which share a prefix."""
    longest, random = min(model.block_size, _MAX_TOKENS), torch.Generator().manual_seed(0)
    lengths = [longest, max(1, longest - 4), longest, max(1, longest // 2)]
    rows = [torch.randint(model.vocab_size, (length,), generator=random).numpy() for length in lengths]
    rows[2][: longest // 2] = rows[0][: longest // 2]
    return rows


class _Contract:
    """Run the checks of `check_model`, one method for each line of the contract."""

    def __init__(self, model: LoopedModel, rows: list[Tensor], tolerance: float) -> None:
        self.model, self.rows, self.tolerance = model, rows, tolerance
        self.depth = min(model.num_loops, _MAX_LOOPS)
        self.checks: tuple[Callable[[], Check], ...] = (
            *(self.embedding, self.one_step, self.shapes, self.repeats, self.order),
            *(self.alone, self.different_loops, self.last_loop, self.divided_loop, self.depth_beyond),
            *(self.causality, self.kv_cache, self.branches),
        )

    def embedding(self) -> Check:
        state = self._embedded(self.rows)
        self._check_state(state, "embed")
        wrong = "embed must return a state at loop 0: loop=torch.zeros_like(layout.lengths)."
        _fail_unless(not state.loop.any(), wrong)
        return self._holds("A state has one entry a token or a row, and begins at loop 0.")

    def one_step(self) -> Check:
        state = self._embedded(self.rows)
        before = {name: getattr(state, name).clone() for name in _state_tensor_names(state)}
        after = self.model.step(state)
        self._check_state(after, "step")
        _fail_unless(
            type(after) is type(state) and after.hidden.shape == state.hidden.shape,
            f"step must return a {type(state).__name__} like the one it was given, with hidden states of the shape "
            f"{list(state.hidden.shape)}; it returned a {type(after).__name__} with {list(after.hidden.shape)}.",
        )
        counted = torch.equal(after.loop, before["loop"] + 1)
        _fail_unless(counted, "step must count: the state that it returns needs loop=state.loop + 1.")
        for name, tensor in before.items():
            same = torch.equal(getattr(state, name), tensor)
            _fail_unless(same, f"step changes '{name}' of the state that it is given; it must return a new state.")
        return self._holds("A step counts its loop and leaves the state before it as it was.")

    def shapes(self) -> Check:
        state = self.model.step(self._embedded(self.rows))
        count, last, differences = len(self.rows), state.lengths - 1, []
        for name in ("pooled", "head_input"):
            at_last, at_all = (getattr(self.model, name)(state, positions) for positions in (last, None))
            wrong = f"{name} must be [{len(state.hidden)}, width] without positions, but is {list(at_all.shape)}."
            _fail_unless(at_all.ndim == 2 and len(at_all) == len(state.hidden), wrong)
            wrong = f"{name} at one position a row is not what it is there of all tokens."
            differences.append(self._largest_difference([at_last], [at_all[state.layout.starts + last]], wrong))
        pooled, logits, *halting = self._outputs(state)
        wrong = f"predict must make [{count}, classes] of {count} states, but made {list(logits.shape)}."
        _fail_unless(logits.ndim == 2 and len(logits) == count and logits.shape[1] > 1, wrong)
        for halts in halting:
            wrong = f"halt must make [{count}] of {count} states, but made {list(halts.shape)}."
            _fail_unless(halts.shape == (count,), wrong)
        head_input = self.model.head_input(state, last)
        twice = self.model.predict(torch.stack((head_input, head_input)))[1]
        wrong = "predict must take states with any number of dimensions in front."
        differences.append(self._largest_difference([twice], [logits], wrong))
        finite = all(bool(values.isfinite().all()) for values in (pooled, *halting))
        _fail_unless(finite, "pooled or halt gives a number that is not finite.")
        _fail_unless(not (logits.isnan() | logits.isposinf()).any(), "predict gives a number that is NaN or infinite.")
        return self._holds("States, logits and halt logits have their shapes, and are finite.", max(differences))

    def repeats(self) -> Check:
        wrong = "The model says something else when it is asked a second time; keep all that changes in the state."
        return self._agree("The same rows get the same answers.", self._loops(self.rows), self._together, wrong)

    def order(self) -> Check:
        backwards = [values.flip(0) for values in self._loops(self.rows[::-1])]
        wrong = "What the model says of a row depends on where it stands in the batch."
        return self._agree("The order of rows does not matter.", backwards, self._together, wrong)

    def alone(self) -> Check:
        by_row = zip(*(self._loops([row]) for row in self.rows), strict=True)
        wrong = (
            "What the model says of a row depends on the rows beside it or on their lengths; mask what is padded, and "
            "let attention stay within a row."
        )
        alone = [torch.cat(values) for values in by_row]
        return self._agree("A row says in a batch what it says alone.", alone, self._together, wrong)

    def different_loops(self) -> Check:
        """Run all loops but one of the first row; then the last row joins it for one loop."""
        first, last = self._embedded(self.rows), self._embedded(self.rows[-1:])
        ahead = [first, *self.model.unroll(first, self.depth - 1)][-1]
        ahead = ahead.take(torch.tensor([0], device=first.loop.device))
        joined = self.model.step(type(first).join([ahead, last]))
        size = len(self._together) // self.depth
        once, deep = self._together[:size], self._together[-size:]
        expected = [torch.cat((late[:1], early[-1:])) for late, early in zip(deep, once, strict=True)]
        wrong = (
            "A row that joins others at a later loop says something else than alone; what step does must depend on "
            "each row's own state.loop only."
        )
        return self._agree("Rows at different loops can share a batch.", self._outputs(joined), expected, wrong)

    def last_loop(self) -> Check:
        state = self._embedded(self.rows)
        last, what = state.lengths - 1, "The last loop may leave out what is not read."
        short = self.model.last_pooled(state, last)
        if short is None:
            return self._holds(what)
        after = self.model.pooled(self.model.step(state), last)
        return self._agree(what, [short], [after], "last_pooled differs from pooled after one more step.")

    def divided_loop(self) -> Check:
        """Run both halves of a loop, the second half for the last row alone."""
        state, what = self._embedded(self.rows), "A loop may be divided where it is read."
        early = self.model.early_pooled(state, state.lengths - 1)
        if early is None:
            return self._holds(what)
        pooled, begun = early
        whole, last = self.model.step(state), np.array([len(self.rows) - 1])
        finished = self._outputs(self.model.finish_step(begun.take(last)))
        expected = [self.model.pooled(whole, state.lengths - 1), *self._outputs(whole.take(last))]
        return self._agree(what, [pooled, *finished], expected, "early_pooled and finish_step differ from one step.")

    def depth_beyond(self) -> Check:
        if not self.model.any_depth:
            return self._holds("It runs at most as many loops as it was trained with (any_depth = False).")
        state = self._embedded(self.rows[:1])
        try:
            *_, deepest = self.model.unroll(state, self.model.num_loops + 1)
            self._outputs(deepest)
        except Exception as error:
            wrong = "The model fails beyond its last loop, so it must set any_depth = False"
            raise UserError(f"{wrong} ({reason(error)}).") from error
        return self._holds("It can run more loops than it was trained with.")

    def causality(self) -> Check:
        if not self.model.causal:
            return self._holds("The model may look ahead (causal = False), so that beginnings are not shared.")
        longest = max(self.rows, key=len)
        prefixes = [longest[:end] for end in range(1, len(longest) + 1)]
        lengths = torch.tensor([len(prefix) for prefix in prefixes], device=longest.device)
        padded = torch.nn.utils.rnn.pad_sequence(prefixes, batch_first=True)
        one_by_one = [self.model.loops(prefix[None], num_loops=self.depth).hidden[:, 0, -1] for prefix in prefixes]
        together = self.model.loops(padded, lengths, self.depth, lengths - 1).hidden  # their shared prefix runs once
        whole = self.model.loops(longest[None], num_loops=self.depth).hidden[:, 0]
        wrong = (
            "What the model says at a token depends on the tokens after it, or on how many there are; it must set "
            "causal = False."
        )
        ours = [torch.stack(one_by_one, 1), together]
        return self._agree("A token does not see what comes after it.", ours, [whole, whole], wrong)

    def kv_cache(self) -> Check:
        """Write rows token by token at one loop, at several loops, and with exits; compare them with one plain pass."""
        if not self.model.kv_cache:
            return self._holds("It declares no KV cache, so LoopScope rejects text.")
        wrong = "A model with a KV cache is causal: earlier tokens are not run again when later ones come."
        _fail_unless(self.model.causal, wrong)
        plain = [self.model.loops(row[None]).logits[:, 0] for row in self.rows]
        require_vocabulary(self.model, plain[0])
        halves = {key: len(row) // 2 for key, row in enumerate(self.rows) if len(row) > 1}
        texts = {key: self.rows[key].cpu().numpy() for key in halves}
        prompts = [Prompt(key, texts[key][:half], texts[key][half:]) for key, half in halves.items()]
        written, expected = [], []
        for policy in (*(ExitPolicy("fixed", depth) for depth in {1, self.depth}), _exits_by_margin(plain)):
            following = {key: half - 1 for key, half in halves.items()}
            for token in stream(self.model, prompts, policy, batch_size=2, with_logits=True):
                assert token.logits is not None
                written.append(token.logits)
                expected.append(plain[token.key][token.loops - 1, following[token.key]])
                following[token.key] += 1
        wrong = (
            "What the model says after cached tokens is not what it says in a plain pass; each layer that attends does "
            "so by cached_attention, under a name of its own, and positions are layout.positions."
        )
        return self._agree("Text written with the KV cache is that of the plain pass.", written, expected, wrong)

    def branches(self) -> Check:
        """Score two continuations of each context, with and without their own prefix, against a plain pass of each."""
        if not self.model.branches:
            return self._holds("It declares no branches, so LoopScope rejects questions with choices.")
        require_vocabulary(self.model, self._together[1])
        requests: list[Request] = []
        expected: list[list[float]] = []
        for row, other in pairwise(row for row in self.rows if len(row) > 1):
            middle = len(row) // 2
            context, continuations = row[:middle], [row[middle:], other[:1], other[: len(row) - middle]]
            tokens = [continuation.cpu().numpy() for continuation in continuations]
            for shared in {0, middle - 1} if self.model.kv_cache else {0}:
                requests.append(choices(len(requests), context.cpu().numpy(), tokens, shared=shared))
                expected.append([self._plain_score(context, each) for each in continuations])
        if not requests:
            return self._holds("Choices that branch off from a context: no row is long enough to have some.")
        answers = in_order(run(self.model, requests, ExitPolicy("fixed", self.depth), 3, self.depth))
        scores = torch.from_numpy(np.stack([answer.logits for answer in answers]))
        wrong = (
            "The model scores choices otherwise than a plain pass over each; every layer that attends does so by "
            "cached_attention, and positions are layout.positions."
        )
        what = "Choices that branch off from a context have the scores of a plain pass."
        return self._agree(what, [scores], [torch.tensor(expected)], wrong)

    def _plain_score(self, context: Tensor, continuation: Tensor) -> float:
        logits = self.model.loops(torch.cat((context, continuation))[None], num_loops=self.depth).logits[-1, 0]
        predicting = logits[len(context) - 1 : -1].double().log_softmax(-1)
        return float(predicting.gather(1, continuation[:, None]).sum())

    @cached_property
    def _together(self) -> list[Tensor]:
        return self._loops(self.rows)

    def _embedded(self, rows: list[Tensor]) -> LoopState:
        lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
        return self.model.begin(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths)

    def _loops(self, rows: list[Tensor]) -> list[Tensor]:
        """The outputs after each loop of a few, [B, ...] each."""
        states = self.model.unroll(self._embedded(rows), self.depth)
        return [output for state in states for output in self._outputs(state)]

    def _outputs(self, state: LoopState) -> list[Tensor]:
        """Pooled states [B, D], logits [B, V], and halt logits [B] where there is a gate, at the last tokens."""
        last = state.lengths - 1
        pooled = self.model.pooled(state, last)
        halting = self.model.halt(pooled)
        logits = self.model.predict(self.model.head_input(state, last))
        return [pooled, logits] if halting is None else [pooled, logits, halting]

    def _check_state(self, state: LoopState, method: str) -> None:
        wrong = f"{method} must return a LoopState, but returned a {type(state).__name__}."
        _fail_unless(isinstance(state, LoopState), wrong)
        for name in _state_tensor_names(state):
            by_token, entries = name in state.tokenwise, len(getattr(state, name))
            what = "token" if by_token else "row (tensors that go by token are named in its `tokenwise`)"
            wrong = f"'{name}' of the state that {method} returns has {entries} entries, not one a {what}."
            _fail_unless(entries == (sum(map(len, self.rows)) if by_token else len(self.rows)), wrong)

    def _holds(self, what: str, difference: float = 0.0) -> Check:
        """A passed check with its largest difference, relative to the largest number compared."""
        return Check("contract", what, difference, "relative", self.tolerance, True)

    def _agree(self, what: str, ours: list[Tensor], theirs: list[Tensor], wrong: str) -> Check:
        return self._holds(what, self._largest_difference(ours, theirs, wrong))

    def _largest_difference(self, ours: list[Tensor], theirs: list[Tensor], wrong: str) -> float:
        """The largest difference, relative to the largest number; infinite if shapes differ or a number is NaN."""
        worst = 0.0
        for mine, other in zip(ours, theirs, strict=True):
            if mine.shape != other.shape or mine.isnan().any() or other.isnan().any():
                worst = float("inf")
                break
            mine, other = (values.double().nan_to_num(neginf=0.0) for values in (mine, other))
            worst = max(worst, float((mine - other).abs().max() / other.abs().max().clamp(min=1e-9)))
        near = worst <= self.tolerance
        _fail_unless(near, f"{wrong[:-1]} (a difference of {worst:.0e}, relative to the largest number).")
        return worst


def _exits_by_margin(plain: list[Tensor]) -> ExitPolicy:
    """A margin policy under which about half of the tokens exit early, so later tokens miss some of their KV cache."""
    two = torch.cat([logits[0] for logits in plain]).float().topk(2).values
    return ExitPolicy("margin", float((two[:, 0] - two[:, 1]).median()))


def _state_tensor_names(state: LoopState) -> list[str]:
    """The names of the tensors in a loop state."""
    return [field.name for field in fields(state) if field.name != "layout"]
