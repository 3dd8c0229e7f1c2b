"""Does the container file build from what is here, and start what LoopScope serves? By its commands alone."""

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "Containerfile").read_text().replace("\\\n", "").splitlines()
(_SERVES,) = (line.removeprefix("ENTRYPOINT") for line in LINES if line.startswith("ENTRYPOINT"))
COMMAND: list[str] = json.loads(_SERVES)


def test_its_vllm_is_one_that_the_extra_takes() -> None:
    versions = {match for line in LINES for match in re.findall(r"vllm-\S+:v(\d+\.\d+)\.\d+", line)}
    (extra,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    lowest, beyond = (tuple(map(int, part.split("."))) for part in re.findall(r"[>=<]+(\d+\.\d+)", extra))
    assert versions
    assert all(lowest <= tuple(map(int, version.split("."))) < beyond for version in versions)


def test_what_it_copies_makes_the_wheel() -> None:
    copied = {
        name for line in LINES if line.startswith("COPY ") and "--from" not in line for name in line.split()[1:-1]
    }
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    wanted |= {package.split("/")[0] for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    assert copied == wanted


def test_it_serves_the_folder_as_it_is() -> None:
    """Whose policy is the one that was saved with the model (tests/integrations/vllm/test_deployment.py)."""
    assert COMMAND[:3] == ["vllm", "serve", "/model"]
    assert "--hf-overrides" not in COMMAND  # which is for those who start the container
