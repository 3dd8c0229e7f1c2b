"""A study on Ray: the same bytes as on one machine, also when a node dies while it runs."""

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_study import Waiting

import loopscope
from loopscope.cli import main
from loopscope.errors import install_command
from loopscope.progress import silent
from loopscope.studies import executors

TINY = Path(__file__).parent / "tiny.toml"
LONGER = ["--set", "training.steps=150", "--set", "training.checkpoint_every=10", "--set", "training.log_every=5"]


def results(folder: Path) -> bytes:
    return (folder / "tiny" / "report" / "results.json").read_bytes()


def words(folder: Path, *more: str) -> list[str]:
    return ["study", "run", str(TINY), "--out", str(folder / "tiny"), *LONGER, *more]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What the study says without Ray."""
    folder = tmp_path_factory.mktemp("local")
    assert main(words(folder)) == 0
    return results(folder)


@pytest.mark.long
def test_a_ray_of_its_own_gives_the_same_bytes(local: bytes, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "loopscope.cli", *words(tmp_path, "--engine", "ray")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert results(tmp_path) == local


@pytest.mark.long
def test_what_is_timed_on_ray_is_timed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    places = [Path(__file__).parent, Path(loopscope.__file__).parents[1]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))
    together, submit = list[int](), executors._await_on_ray
    monkeypatch.setattr(
        executors, "_await_on_ray", lambda ray, some, work: (together.append(len(some)), submit(ray, some, work))
    )
    steps = [Waiting(number=number) for number in range(3)]
    executors._run_on_ray([*steps], executors.StudyWork([*steps], tmp_path, ["cpu"], 1, silent), None, alone=True)
    assert together == [1, 1, 1]
    spans = sorted(json.loads((step.folder(tmp_path) / "span.json").read_bytes()) for step in steps)
    assert all(first[1] <= second[0] for first, second in pairwise(spans))


@pytest.mark.long
def test_a_node_that_dies_takes_nothing_with_it(local: bytes, tmp_path: Path) -> None:
    """Of two on this machine, with one task each."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    store = tmp_path / "store"
    command = [sys.executable, "-m", "loopscope.cli", *words(tmp_path, "--engine", "ray", "--address", cluster.address)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as study:
        while len(running := list(store.glob("run-*/state.safetensors"))) < 2:  # one run on each node, half-way
            assert study.poll() is None, "the study ended too early"
            time.sleep(0.02)
        (victim,) = cluster.worker_nodes
        cluster.remove_node(victim, allow_graceful=False)
        half_way = [path for path in running if not path.with_name("model.safetensors").exists()]
        print(f"Killed a node of two with {len(half_way)} runs half-way.")
        assert len(half_way) == 2
        assert study.wait() == 0
    cluster.shutdown()
    assert results(tmp_path) == local


def test_without_ray_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(words(tmp_path, "--engine", "ray")) == 2
    assert install_command("ray") in capsys.readouterr().err


def test_an_address_where_nobody_is_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    assert main(words(tmp_path, "--engine", "ray", "--address", "nowhere")) == 2
    assert "no Ray cluster" in capsys.readouterr().err
