"""With which versions did these tests run? With those of transformers that the extras allow, and no others."""

import tomllib
from importlib.metadata import version
from pathlib import Path

import transformers
from packaging.specifiers import SpecifierSet

TESTED = (">=5.19", "<5.24")
"""Both ends of the range ran these tests; another version is allowed after it ran them."""
OTHERS = ("torch", "accelerate", "peft", "trl", "lm_eval")


def test_the_extras_allow_the_versions_that_were_tested() -> None:
    project = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())["project"]
    wanted = f"transformers{','.join(TESTED)}"
    for extra in ("transformers", "lm", "gguf", "dev"):
        names = [name for name in project["optional-dependencies"][extra] if name.startswith("transformers")]
        assert names == [wanted], extra


def test_this_version_is_one_of_them() -> None:
    others = ", ".join(f"{name} {version(name)}" for name in OTHERS)
    print(f"\ntransformers {transformers.__version__}; {others}")
    assert transformers.__version__ in SpecifierSet(",".join(TESTED))
