"""Does `vllm serve` answer a client of OpenAI's, streamed, with a certified policy from its file?"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from itertools import chain
from pathlib import Path

import pytest
from vllm_engines import SENTENCES, expected, noted, write_small_ouro

import loopscope as ls
from loopscope.cli import main

pytest.importorskip("vllm.config", reason="needs an environment with vLLM: make test-vllm")

TEXTS = ("The sun", "3 and 4 make", "Plants grow, as the sun makes them grow, and 12 and 5 make 17, as")


def test_a_streamed_answer(tmp_path: Path) -> None:
    from openai import OpenAI
    from tokenizers import Tokenizer

    folder, log = write_small_ouro(tmp_path / "small"), tmp_path / "exits.jsonl"
    certify(folder, tmp_path)
    policy = ls.ExitPolicy.load(tmp_path / "text.json")
    assert policy.guarantee is not None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    tokens, loops = expected(folder, prompts, policy, "propagate", new=12)
    assert len(set(chain(*loops))) > 1
    told = {"loopscope": {"policy": str(tmp_path / "text.json"), "exits_log": str(log)}}
    texts: list[str] = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(Path(sys.executable).with_name("vllm")), "serve", str(folder), "--served-model-name", "small"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "128"]
    words += ["--max-num-seqs", "4", "--hf-overrides", json.dumps(told)]
    with (tmp_path / "server.txt").open("w") as output:
        server = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
        try:
            _wait(server, f"http://127.0.0.1:{port}/health", tmp_path / "server.txt")
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            for text, wanted in zip(TEXTS, tokens, strict=True):
                options = {"ignore_eos": True, "return_token_ids": True}
                parts = list(
                    client.completions.create(
                        model="small", prompt=text, max_tokens=12, temperature=0, stream=True, extra_body=options
                    )
                )
                assert len(parts) > 3
                said = [token for part in parts for token in part.choices[0].model_extra["token_ids"]]
                assert said == wanted
                texts.append("".join(part.choices[0].text for part in parts))
                assert tokenizer.decode(wanted).startswith(texts[-1])  # a character that is not complete is not sent
        finally:
            server.terminate()
            server.wait(60)
    assert any(texts)
    assert noted(log, prompts, new=12)[0] == loops


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
