"""With which versions did these tests run? With those that the extra `vllm` allows, and no others."""

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

TESTED = (">=0.32", "<0.33")
"""Another version is allowed after it ran these tests."""


def test_the_extra_allows_the_versions_that_were_tested() -> None:
    project = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm{','.join(TESTED)}"]


def test_this_version_is_one_of_them() -> None:
    pytest.importorskip("vllm.config", reason="needs an environment with vLLM: make test-vllm")
    from packaging.specifiers import SpecifierSet
    from vllm import __version__

    names = ("torch", "transformers", "openai")
    print(f"\nvLLM {__version__}; {', '.join(f'{name} {version(name)}' for name in names)}")
    assert __version__.split("+")[0] in SpecifierSet(",".join(TESTED))
