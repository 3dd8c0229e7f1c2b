"""How does a looped model answer lm_eval's requests? With likelihoods of continuations, and with generated texts.

- A question is all requests about one context of one document. Its context runs once, its choices branch off from it,
  and a prefix that a task's contexts share runs once for all. Under a policy a question exits as a whole: by its gate
  or state at the context's end, or by the distribution over its choices.
- Requests without choices (a single continuation, a rolling text) are scored as if they were generated: under a policy
  every token exits for itself.
- Texts are generated with the requested cache mode, every token as deep as the policy decides.

Importing this module registers the model in lm_eval as `loopscope`.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from loopscope.engine.generation import Prompt, StopStrings, Token, stream
from loopscope.engine.requests import Request, choices
from loopscope.engine.sampling import Sampling
from loopscope.engine.scheduler import run
from loopscope.errors import UserError
from loopscope.models.checkpoint import load_model
from loopscope.models.checkpoint_folder import end_tokens, find_checkpoint, named_exits
from loopscope.models.device import accumulator
from loopscope.models.looped_model import LoopedModel
from loopscope.models.tokenizer import encode, load_tokenizer, render_chat, stop_tokens
from loopscope.policy import ExitPolicy
from loopscope.progress import ProgressCallback, silent
from loopscope.questions import EncodedQuestion, Question, encode_questions
from loopscope.recording.question_recording import BATCH_TOKENS
from loopscope.scope import CacheMode

Likelihood = tuple[float, bool]
_MIN_SHARED = 32
"""The shortest shared prefix, in tokens, that is run separately."""
LM_EVAL_DEVICE = "cuda:0"
"""The device that lm_eval's command line passes by default."""
_NEUTRAL = (None, False, 0, 1)
"""Values that have no effect in any generation setting."""


@register_model("loopscope")
class LoopScopeLM(TemplateLM):  # type: ignore[misc]
    """Run a looped model for lm_eval: at full depth, at `loops`, or under a `policy`."""

    def __init__(
        self,
        pretrained: str | Path | LoopedModel,
        *,
        tokenizer: Any = None,
        loops: int | None = None,
        policy: ExitPolicy | str | Path | None = None,
        cache: CacheMode | None = None,
        device: str = "cpu",
        dtype: str | None = None,
        batch_size: int | str = 8,
        batch_tokens: int = BATCH_TOKENS,
        max_batch_size: int | None = None,
        max_gen_toks: int = 256,
        think_end_token: str | None = None,
        seed: int = 0,
        progress: ProgressCallback = silent,
    ) -> None:
        """Load the model: `pretrained` is a folder, a Hub id, or a model with its `tokenizer`; `policy` may be a file.

        Without `loops` and `policy`, a folder runs under the policy that was saved with it, if any. Texts use the KV
        cache mode `cache`: by default the mode for which the policy was calibrated, or `full`. `batch_size` texts are
        generated together, `batch_tokens` tokens of questions run together. Text before `think_end_token` is no part of
        an answer. `max_batch_size` exists because lm_eval passes it.
        """
        super().__init__()
        if loops is not None and policy is not None:
            raise UserError("A fixed depth and a policy exclude each other; give one of them.")
        if isinstance(pretrained, LoopedModel):
            self.model, self.tokenizer, self._ends = pretrained, tokenizer, stop_tokens(tokenizer)
        else:
            folder = find_checkpoint(pretrained)
            if loops is None and policy is None:
                exits = named_exits(folder)
                policy, cache = exits.policy, cache or exits.cache
            self.tokenizer = load_tokenizer(folder) if tokenizer is None else tokenizer
            self.model = load_model(folder, device, dtype)
            self._ends = stop_tokens(self.tokenizer, end_tokens(folder))
        if isinstance(policy, (str, Path)):
            policy = ExitPolicy.load(policy)
        self.policy = policy or ExitPolicy("fixed", self.model.num_loops if loops is None else loops)
        self._adaptive = self.policy.fixed_depth is None
        self.used: dict[str, tuple[int, int]] = {}
        """For every task: its decisions, and the loops of all of them."""
        self._cache = cache or self.policy.cache
        self._seed, self._progress, self._think_end = seed, progress, think_end_token
        self._device = next(self.model.parameters()).device
        self.batch_size = int(batch_size) if str(batch_size).isdigit() else 8
        self.max_length, self.max_gen_toks = self.model.block_size, int(max_gen_toks)
        self._batch_tokens = int(batch_tokens)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """Make the model from lm_eval's arguments; lm_eval passes `cuda:0` if the user names no device."""
        more = dict(additional_config or {})
        if more.get("device") == LM_EVAL_DEVICE and not torch.cuda.is_available():
            logging.getLogger(__name__).warning("There is no CUDA device here; the model runs on the CPU.")
            more["device"] = "cpu"
        return super().create_from_arg_obj(arg_dict, more)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return render_chat(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenize as lm_eval's Hugging Face model does: special tokens by default, but the first one never twice."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return encode(self.tokenizer, string, add_special_tokens)

    def get_model_info(self) -> dict[str, Any]:
        """The description of the model in lm_eval's results."""
        return {
            "model_num_parameters": sum(each.numel() for each in self.model.parameters()),
            "model_dtype": self.model.precision,
            "model_sha": self.model.weights_sha256,
            "exit_policy": str(self.policy),
            "cache": self._cache,
            "num_loops": self.model.num_loops,
            "average_loops": {name: loops / count for name, (count, loops) in self.used.items()},
        }

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Likelihood]:
        numbers_by_context: dict[tuple[Any, ...], list[int]] = {}
        for number, request in enumerate(requests):
            numbers_by_context.setdefault((request.task_name, request.doc_id, request.args[0]), []).append(number)
        questions = [
            Question(f"{task}/{document}", context, tuple(requests[number].args[1] for number in numbers), 0, (), task)
            for (task, document, context), numbers in numbers_by_context.items()
        ]
        encoded = encode_questions(questions, self.tokenizer, self.max_length - self._adaptive)
        together, alone = [], []
        for key, (question, tokens) in enumerate(zip(questions, encoded, strict=True)):
            if len(question.choices) == 1 and (self._adaptive or self.policy.scope.unit == "tokens"):
                alone.append(Prompt(key, tokens.context, tokens.choices[0]))
            else:
                shared = tokens.prefix if tokens.prefix >= _MIN_SHARED else 0
                together.append(self._question(key, question, tokens, shared))
        names = [question.subject or "" for question in questions]
        scored = self._together(together, names)
        if alone:
            scored |= {key: [one] for key, one in self._alone(alone, names).items()}
        answers: list[Likelihood] = [(0.0, False)] * len(requests)
        for key, numbers in enumerate(numbers_by_context.values()):
            for number, answer in zip(numbers, scored[key], strict=True):
                answers[number] = answer
        return answers

    def _question(self, key: int, question: Question, tokens: EncodedQuestion, shared: int) -> Request:
        """The request of a question, scored as in the policy's calibration, without lm_eval's space before a choice."""
        score = self.policy.scope.score or "sum"
        texts = [choice.removeprefix(" ") for choice in question.choices]
        sizes = {"sum": (), "per_character": map(len, texts), "per_byte": (len(text.encode()) for text in texts)}
        norms = [max(size, 1) for size in sizes[score]]
        whole = self.policy.scope.state == "mean_over_choices"
        return choices(key, tokens.context, tokens.choices, norms, shared, whole, score)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows, owners, names = [], [], []
        for number, request in enumerate(requests):
            cut = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length - self._adaptive, 1
            )
            for window in map(make_disjoint_window, cut):
                windows.append((None, *window))
                owners.append(number)
                names.append(request.task_name or "")
        totals = [0.0] * len(requests)
        for owner, (likely, _) in zip(owners, self._loglikelihood_tokens(windows, names), strict=True):
            totals[owner] += likely
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], names: Sequence[str] | None = None, **_: Any
    ) -> list[Likelihood]:
        """Score every context with its single continuation; the windows of a rolling text fit the model."""
        names = names or [""] * len(requests)
        pairs = [(np.array(context), np.array(continuation)) for _, context, continuation in requests]
        if self._adaptive:
            alone = self._alone([Prompt(key, *pair) for key, pair in enumerate(pairs)], names)
            return [alone[key] for key in range(len(pairs))]
        scored = self._together([choices(key, context, [rest]) for key, (context, rest) in enumerate(pairs)], names)
        return [scored[key][0] for key in range(len(pairs))]

    def _together(self, requests: Sequence[Request], names: Sequence[str]) -> dict[int, list[Likelihood]]:
        """Score numbered questions; questions with one prefix, and then of one length, run together."""
        ordered = sorted(requests, key=lambda each: (each.prefix, len(each.tokens)))
        norms = {request.key: np.asarray(request.norms) for request in requests}
        scored: dict[int, list[Likelihood]] = {}
        for answer in run(self.model, ordered, self.policy, 1024, batch_tokens=self._batch_tokens, greedy=True):
            assert answer.greedy is not None
            likely = answer.logits.astype(np.float64) * norms[answer.key]
            scored[answer.key] = list(zip(likely.tolist(), answer.greedy.tolist(), strict=True))
            self._count(names[answer.key], answer.loop)
            self._progress(len(scored), len(requests), "questions")
        return scored

    def _alone(self, prompts: Sequence[Prompt], names: Sequence[str]) -> dict[int, Likelihood]:
        """Score continuations token by token, as if they were generated."""
        forced = {prompt.key: prompt.forced for prompt in prompts}
        scored: dict[int, list[Likelihood]] = {prompt.key: [] for prompt in prompts}
        for token in self._tokens_of(prompts, names, with_logits=True):
            expected, logits = forced[token.key], token.logits
            assert expected is not None
            assert logits is not None
            target = int(expected[len(scored[token.key])])
            wide = logits.to(accumulator(logits.device))
            log_prob, likeliest = torch.stack((wide[target] - wide.logsumexp(-1), wide.argmax().to(wide))).tolist()
            scored[token.key].append((log_prob, int(likeliest) == target))
        return {
            key: (sum(likely for likely, _ in tokens), all(greedy for _, greedy in tokens))
            for key, tokens in scored.items()
        }

    def _tokens_of(self, prompts: Sequence[Prompt], names: Sequence[str], **options: Any) -> Iterator[Token]:
        """Generate after prompts; the longest come first, so that the cache grows once."""
        ordered, done = sorted(prompts, key=lambda prompt: -len(prompt.tokens)), 0
        for token in stream(self.model, ordered, self.policy, cache=self._cache, batch_size=self.batch_size, **options):
            self._count(names[token.key], token.loops)
            done += token.finish_reason is not None
            self._progress(done, len(prompts), "texts")
            yield token

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(number)
        for numbers in alike.values():
            for number, text in zip(numbers, self._generated([requests[number] for number in numbers]), strict=True):
                texts[number] = text
        return texts

    def _generated(self, requests: Sequence[Any]) -> list[str]:
        """Generate the texts of requests with the same settings."""
        options = dict(normalize_gen_kwargs(requests[0].args[1], self.max_gen_toks))
        until, most = [string for string in options.pop("until") if string], options.pop("max_gen_toks")
        room = self.max_length - most
        if room < 1:
            raise UserError(
                f"{most} tokens are to be generated, and the model takes {self.max_length} with the prompt; ask for "
                "fewer (max_gen_toks)."
            )
        stop_strings = StopStrings(self.tokenizer, until, self._think_end)
        prompts = [
            Prompt(key, np.array(self.tok_encode(request.args[0])[-room:], dtype=np.int64))
            for key, request in enumerate(requests)
        ]
        names, sampling = [request.task_name or "" for request in requests], sampling_of(options, self._seed)
        how: dict[str, Any] = {"max_new_tokens": most, "stop": self._ends, "sampling": sampling}
        list(self._tokens_of(prompts, names, stopping_criterion=stop_strings, **how))
        return [stop_strings.text(key, self._ends) for key in range(len(requests))]

    def _count(self, task: str, loops: int) -> None:
        count, total = self.used.get(task, (0, 0))
        self.used[task] = (count + 1, total + loops)


def sampling_of(options: dict[str, Any], seed: int) -> Sampling:
    """Turn lm_eval's generation settings into a `Sampling`; unknown settings must have no effect."""
    rest = dict(options)
    temperature = float(rest.pop("temperature", 0.0) or 0.0)
    if not rest.pop("do_sample", False):
        temperature = 0.0
    known = {name: rest.pop(name) for name in ("top_k", "top_p") if rest.get(name) is not None}
    for name, value in rest.items():
        if value not in _NEUTRAL:
            raise UserError(f"A task asks for '{name}' = {value} in its texts, and LoopScope has no such setting.")
    return Sampling(temperature=temperature, seed=seed, **known)
