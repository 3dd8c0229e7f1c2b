"""Does lm_eval's own Hugging Face model, on registered looped checkpoints, say what LoopScope's says?"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_slices import asked
from tiny_language import write_outspoken

import loopscope.integrations.transformers  # noqa: F401 - registers
from loopscope.integrations.lm_eval.__main__ import cli_evaluate
from loopscope.integrations.lm_eval.lm_eval_model import LoopScopeLM


@pytest.fixture(scope="module")
def outspoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_outspoken(tmp_path_factory.mktemp("outspoken") / "ouro")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2], "pad_token_id": 0}))
    return folder


@pytest.mark.parametrize("batch_size", [5, pytest.param(1, marks=pytest.mark.long)])
def test_hf_scores_slices_as_ours_does(outspoken: Path, batch_size: int) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    questions = [*asked("openbookqa")[:8], *asked("arc_easy")[:3], *asked("commonsense_qa", "validation")[:3]]
    pairs = [(place, q.context, choice) for place, q in enumerate(questions) for choice in q.choices]
    requests = [Instance("loglikelihood", {}, tuple(pair), 0, ("slice", place, 1)) for place, *pair in pairs]
    theirs = HFLM(pretrained=str(outspoken), device="cpu", batch_size=batch_size, dtype="float32")
    assert type(theirs.model).__name__ == "OuroForCausalLM"
    assert theirs.max_length == 1024
    found = theirs.loglikelihood(requests, disable_tqdm=True)
    ours = LoopScopeLM(outspoken, batch_tokens=2000).loglikelihood(requests)
    np.testing.assert_allclose([likely for likely, _ in found], [likely for likely, _ in ours], atol=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in ours]

    settings = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    texts = [
        Instance("generate_until", {}, (question.context[-60 - place :], settings), 0, ("slice", place, 1))
        for place, question in enumerate(questions[:4])
    ]
    assert theirs.generate_until(texts, disable_tqdm=True) == LoopScopeLM(outspoken).generate_until(texts)


@pytest.mark.long
def test_lm_eval_s_own_command_line_knows_both(
    outspoken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"q": q.context[-80:], "choices": list(q.choices), "a": q.label} for q in asked("openbookqa")[:6]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "some.yaml").write_text(
        f"""task: some
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{a}}}}"
"""
    )
    found: list[Any] = []
    for model in ("loopscope", "hf"):
        words = ["--model", model, "--model_args", f"pretrained={outspoken}", "--tasks", str(tmp_path / "some.yaml")]
        out = tmp_path / model
        monkeypatch.setattr(sys, "argv", ["lm_eval", *words, "--output_path", str(out)])
        cli_evaluate()
        (path,) = out.rglob("results_*.json")
        found.append(json.loads(path.read_text())["results"]["some"])
    assert found[0]["acc,none"] == found[1]["acc,none"]
