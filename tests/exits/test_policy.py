"""Are policies of earlier versions read as they were meant?"""

import json
from pathlib import Path

import pytest
from conftest import GOLDEN

import loopscope as ls
from loopscope.config import digest
from loopscope.errors import UserError

SCHEMA_2 = GOLDEN / "policies" / "schema2.json"
"""Calibrated by the version that called a guarantee a promise."""


def test_an_older_file_keeps_its_guarantee(tmp_path: Path) -> None:
    policy = ls.ExitPolicy.load(SCHEMA_2)
    assert (policy.readout, policy.threshold, policy.model) == ("margin", 0.783621683716774, "ab" * 32)
    assert policy.guarantee is not None
    assert (policy.guarantee.max_drop, policy.guarantee.confidence) == (0.05, 0.9)
    policy.save(tmp_path / "policy.json")
    assert json.loads((tmp_path / "policy.json").read_bytes())["schema_version"] == 7
    assert ls.ExitPolicy.load(tmp_path / "policy.json") == policy


@pytest.mark.parametrize("change", [{"threshold": 0.7}, {"schema_version": 1}, {"digest": ""}])
def test_an_older_file_that_was_altered_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(json.loads(SCHEMA_2.read_bytes()) | change))
    with pytest.raises(UserError, match="altered since it was calibrated"):
        ls.ExitPolicy.load(path)


def test_an_older_promise_for_text_is_for_the_exact_cache(tmp_path: Path) -> None:
    """Those versions knew no other; they did not say so in the file."""
    path, values = tmp_path / "policy.json", json.loads(SCHEMA_2.read_bytes())
    values["promise"]["tested"]["sequences"] = 40
    path.write_text(json.dumps(values | {"digest": digest(values | {"digest": ""})}))
    assert ls.ExitPolicy.load(path).scope.cache == "full"
    assert ls.ExitPolicy.load(SCHEMA_2).scope.cache is None
