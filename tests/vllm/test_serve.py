"""Does `vllm serve` answer a client of OpenAI's, streamed, with a policy from its file?"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from benchmark_slices import byte_pairs
from tiny_language import write_outspoken
from vllm_engines import expected, noted

import loopscope as ls

pytest.importorskip("vllm.config", reason="needs an environment with vLLM: make test-vllm")

TEXTS = ("The sun", "A plant needs water and", "Where would a person go to see many different animals? The answer:")


def test_a_streamed_answer(tmp_path: Path) -> None:
    from openai import OpenAI

    folder, log = write_outspoken(tmp_path / "small", total_ut_steps=4), tmp_path / "exits.jsonl"
    policy = ls.ExitPolicy("gate", 0.5)
    policy.save(folder / "policy.json")
    prompts = [byte_pairs().encode(text) for text in TEXTS]
    tokens, loops = expected(folder, prompts, policy, "propagate", new=12)
    told = {"loopscope": {"policy": str(folder / "policy.json"), "exits_log": str(log)}}
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
                assert "".join(part.choices[0].text for part in parts) == byte_pairs().decode(wanted)
        finally:
            server.terminate()
            server.wait(60)
    assert noted(log, prompts, new=12)[0] == loops


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
