"""Does `vllm serve` answer a client of OpenAI at the depths that it asks for, by a certified policy that transformers
saved with the model?
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm_engines import SENTENCES, expected, write_small_ouro

import loopscope as ls
import loopscope.integrations.transformers
from loopscope.cli import main
from loopscope.models.checkpoint_folder import named_exits

pytest.importorskip("vllm.config", reason="needs an environment with vLLM: make test-vllm")

NEW = 12
TEXTS = ("The sun", "3 and 4 make", "Plants grow, as the sun makes them grow, and 12 and 5 make 17, as")


def test_a_served_model(tmp_path: Path) -> None:
    """Streamed answers, three depths in one batch, and what `/metrics` and the log say of them.

    The texts are those of `loopscope.generate`, and of transformers' `generate` on the same folder.
    """
    from openai import BadRequestError, OpenAI
    from tokenizers import Tokenizer

    folder = save_with_policy(write_small_ouro(tmp_path / "small"), tmp_path)
    policy = ls.ExitPolicy.load(named_exits(folder).policy)
    assert policy.guarantee is not None
    fast = ls.ExitPolicy("margin", 0.5)
    fast.save(tmp_path / "fast.json")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    tokens, loops = expected(folder, prompts, policy, "propagate", new=NEW)
    assert len(set(chain(*loops))) > 1
    assert written_by_transformers(folder, prompts) == tokens
    told = {"policies": {"fast": str(tmp_path / "fast.json")}}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(Path(sys.executable).with_name("vllm")), "serve", str(folder), "--served-model-name", "small"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "128"]
    words += ["--max-num-seqs", "16", "--hf-overrides", json.dumps({"loopscope": told})]
    taken: Counter[int] = Counter(chain(*loops))
    with (tmp_path / "server.txt").open("w") as output:
        server = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(server, f"{url}/health", tmp_path / "server.txt")
            assert sum(counted(url).values()) == 0
            client = OpenAI(base_url=f"{url}/v1", api_key="none")
            assert streamed(client, tokenizer) == tokens
            for depth, own_tokens, own_loops in answered_at_depths(client):
                rule = {"full": None, 2: ls.ExitPolicy("fixed", 2), "fast": fast, None: policy}[depth]
                wanted = expected(folder, prompts, rule, "propagate" if rule else "full", new=NEW)
                assert (own_tokens, own_loops) == wanted
                taken += Counter(chain(*own_loops))
            found = counted(url)
            print(f"\n/metrics: tokens by their loops {found}")
            assert found == dict(taken)
            with pytest.raises(BadRequestError, match="from 1 to 4, or 'full', 'fast'; got 'slow'"):
                answer(client, TEXTS[0], "slow")
            with pytest.raises(BadRequestError, match="Unknown argument 'loopscope_depht'"):
                answer(client, TEXTS[0], 2, key="loopscope_depht")
        finally:
            server.terminate()
            server.wait(60)
    started = (tmp_path / "server.txt").read_text()
    assert "LoopScope switches off for exit policies: prefix caching" in started
    assert f"cache 'propagate'; the policy is {policy} (guarantee: {policy.guarantee.sentence})" in started


def streamed(client: Any, tokenizer: Any) -> list[list[int]]:
    """The tokens of these texts, one after the other."""
    answers = []
    for text in TEXTS:
        options = {"ignore_eos": True, "return_token_ids": True}
        parts = list(
            client.completions.create(
                model="small", prompt=text, max_tokens=NEW, temperature=0, stream=True, extra_body=options
            )
        )
        assert len(parts) > 3
        answers.append([token for part in parts for token in part.choices[0].model_extra["token_ids"]])
        written = "".join(part.choices[0].text for part in parts)
        assert tokenizer.decode(answers[-1]).startswith(written)  # a character that is not complete is not sent
    return answers


def answer(client: Any, text: str, depth: str | int | None, key: str = "loopscope_depth") -> Any:
    options = {"ignore_eos": True, "return_token_ids": True, **({} if depth is None else {"vllm_xargs": {key: depth}})}
    return client.completions.create(model="small", prompt=text, max_tokens=NEW, temperature=0, extra_body=options)


def answered_at_depths(client: Any) -> Iterator[tuple[str | int | None, list[list[int]], list[list[int]]]]:
    """The tokens and loops of these texts at every depth, all of which were requested at once."""
    depths: tuple[str | int | None, ...] = ("full", 2, "fast", None)
    pairs = [(text, depth) for depth in depths for text in TEXTS]
    with ThreadPoolExecutor(len(pairs)) as threads:
        answers = list(threads.map(lambda pair: answer(client, *pair), pairs))
    for number, depth in enumerate(depths):
        own = answers[number * len(TEXTS) : (number + 1) * len(TEXTS)]
        described = [found.kv_transfer_params["loopscope"] for found in own]
        if depth is not None:
            assert all(found["depth"] == depth for found in described)
        yield depth, [found.choices[0].token_ids for found in own], [found["loops"] for found in described]


def counted(url: str) -> dict[int, int]:
    """Tokens by their loops, as `/metrics` has them."""
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    exits = {
        int(loop): int(float(count))
        for labels, count in re.findall(r"^vllm:loopscope_exits_total{(.*)} (\S+)$", text, re.MULTILINE)
        for loop in re.findall(r'loop="(\d+)"', labels)
        if 'model_name="small"' in labels
    }
    parts = {
        part: sum(map(float, re.findall(rf"^vllm:loopscope_loops_per_token_{part}{{.*}} (\S+)$", text, re.MULTILINE)))
        for part in ("count", "sum")
    }
    assert parts == {"count": sum(exits.values()), "sum": sum(loop * count for loop, count in exits.items())}
    assert (re.search(r'^vllm:loopscope_loops_per_step_bucket{.*le="4.0".*}', text, re.MULTILINE)) is not None
    return {loop: count for loop, count in exits.items() if count}


def save_with_policy(folder: Path, out: Path) -> Path:
    """The model as transformers saves it, with a policy that was certified for it."""
    certify(folder, out)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.exit_policy = out / "text.json"
    model.save_pretrained(out / "saved")
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, out / "saved")
    return out / "saved"


def written_by_transformers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """New tokens under the policy that the folder names."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    options = {"max_new_tokens": NEW, "eos_token_id": None, "do_sample": False}
    texts = [model.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in prompts]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def certify(folder: Path, out: Path) -> None:
    """Calibrates a policy for the cache that vLLM has: `text.json`."""
    (out / "mine.txt").write_text("<|endoftext|>".join(SENTENCES))
    text, live, limit = str(out / "text"), str(out / "live"), ("--max-drop", "0.3", "--cache", "propagate")
    for words in (
        ("record", "text", str(folder), str(out / "mine.txt"), "--split", "validation", "--out", text),
        ("record", "live", str(folder), str(out / "mine.txt"), "--recording", text, *limit, "--out", live),
        ("calibrate", live, "--loss", "disagreement", *limit, "--out", str(out / "text.json")),
    ):
        assert main(words) == 0


def _wait(server: "subprocess.Popen[bytes]", url: str, output: Path) -> None:
    """Until the server answers."""
    for _ in range(600):
        if server.poll() is not None:
            pytest.fail(output.read_text()[-3000:])
        try:
            urllib.request.urlopen(url, timeout=2)
            return
        except OSError:
            time.sleep(1)
    pytest.fail(output.read_text()[-3000:])
