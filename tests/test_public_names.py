"""Is every public name documented, and do its examples run?

The examples share the lines that docs/reference/python.md begins with; what takes the Hub is small here.
"""

import doctest
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas
import pytest
import torch
from benchmark_slices import DATA, byte_pairs
from tiny_language import write_decoder, write_ouro

import loopscope as ls
from loopscope.models.custom_model import MODELS

PAGE = (Path(__file__).parents[1] / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
NAMES = [name for name in ls.__all__ if name != "READOUTS"]  # a dictionary
NO_VERBS = {"The", "A", "An", "What", "Which", "Whether", "By", "All", "One", "Every", "Of", "In", "It", "How", "At"}
"""A summary says what to do: neither 'Returns ...' nor 'The ...'."""
WRAPPERS = {property: "fget", cached_property: "func", classmethod: "__func__", staticmethod: "__func__"}


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class that LoopScope defines, each with the class that defines it."""
    for owner in kind.__mro__:
        if owner.__module__.startswith("loopscope"):
            yield from ((name, found) for name, found in vars(owner).items() if not name.startswith("_"))


def documented() -> dict[str, tuple[Any, str]]:
    """Every public name and every public method, with its kind: function, class, method or property."""
    found: dict[str, tuple[Any, str]] = {}
    for name in NAMES:
        what = getattr(import_module(ls._HOMES[name]), name)  # `ls.report` may be the room
        found[name] = (what, "class" if inspect.isclass(what) else "function")
        for member, wrapped in members(what) if inspect.isclass(what) else ():
            function = getattr(wrapped, WRAPPERS.get(type(wrapped), ""), wrapped)
            if inspect.isfunction(function):
                kind = "property" if isinstance(wrapped, property | cached_property) else "method"
                if function.__doc__ or f"{name}.{member}" not in found:
                    found[f"{name}.{member}"] = (function, kind)
    return found


DOCUMENTED = documented()


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring in NumPy's style."""
    parts = re.split(r"^(\w+)\n-+\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def parameters(function: Any) -> set[str]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    taken = inspect.signature(function).parameters.items()
    names = {stars.get(each.kind, "") + name for name, each in taken} - {"self", "cls"}
    return names if names != {"*args", "**kwargs"} else set()  # those of torch.nn.Module


def described(section: str) -> set[str]:
    lines = re.findall(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)$", section, re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


def test_what_is_listed_are_the_public_names() -> None:
    assert dir(ls) == sorted([*ls.__all__, "__version__"])


@pytest.mark.parametrize("name", DOCUMENTED)
def test_it_is_documented(name: str) -> None:
    what, kind = DOCUMENTED[name]
    text = inspect.cleandoc(what.__doc__ or "")
    first, found = text.split(None, 1)[0] if text else "", sections(text)
    assert text.partition("\n")[0].endswith((".", "?", ".")), f"{name} has no summary"
    assert first not in NO_VERBS, f"{name}: begin with a verb, not '{first}'"
    assert first == "Express" or not first.endswith("s"), f"{name}: begin with a verb, not '{first}'"
    if kind != "property":
        assert parameters(what) <= described(found.get("Parameters", "")), f"{name}: parameters that are not described"
    if kind == "function" or (kind == "method" and inspect.signature(what).return_annotation not in (None, "None")):
        assert "Returns" in found, f"{name} does not say what it returns"
    if kind == "function":
        assert "Raises" in found, f"{name} does not say what it raises"
    if kind in ("class", "function"):
        assert ">>> " in found["Examples"], f"{name} has no example"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the examples share, as the page defines it."""
    (setup,) = re.findall(r"```python\n(.*?)```", PAGE.partition("\n## ")[0], re.DOTALL)
    folder = tmp_path_factory.mktemp("examples")
    (folder / "my_model.py").write_text(setup, encoding="utf-8")
    with patch.object(sys, "path", [str(folder), *sys.path]):
        sys.modules.pop("my_model", None)  # of another test
        torch.manual_seed(0)
        module = import_module("my_model")
        write_decoder(folder / "llama", tokenizer=byte_pairs(), eos_token_id=0)
        small = {"folder": folder, "checkpoint": write_ouro(folder / "ouro", byte_pairs()), "llama": folder / "llama"}
        yield {**module.__dict__, **small, "benchmarks": DATA}
        del sys.modules["my_model"]


@pytest.mark.parametrize("name", NAMES)
def test_its_example_runs(name: str, shared: dict[str, Any]) -> None:
    text = inspect.cleandoc(getattr(ls, name).__doc__ or "")
    example = doctest.DocTestParser().get_doctest(text, dict(shared), name, None, 0)
    printed: list[str] = []
    with patch.dict(MODELS), patch.dict(ls.READOUTS):
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=printed.append, clear_globs=False)
    assert not printed, "".join(printed)


def test_results_are_data_frames(shared: dict[str, Any]) -> None:
    validation, test = shared["validation"], shared["test"]
    frontier = ls.sweep("margin", validation, test)
    table = frontier.to_pandas()
    assert list(table.columns) == list(frontier.to_dict())
    assert table.average_loops[table.accuracy >= 0.9].min() == frontier.depth_at(0.9)
    found = ls.diagnose(validation, test)
    (gap,) = found.to_pandas().query("gap == 'readout gap'").to_dict("records")
    assert found.readout_gap is not None
    assert (gap["value"], gap["low"]) == (found.readout_gap.value, found.readout_gap.low)
    compared = ls.compare(validation, test, "gate", "margin")
    assert compared.to_pandas().set_index("difference").value["accuracy"] == compared.selected.accuracy.value
    held = ls.check_policy(ls.ExitPolicy("margin", 2.0), test)
    assert held.to_pandas().set_index("quantity").high["average_loops"] == held.average_loops.high
    results = ls.transfer({"mine": (validation, test)})
    assert pandas.DataFrame(results).readout.tolist() == [each.readout for each in results]


def test_without_pandas_the_columns_are_there(shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    frontier = ls.sweep("margin", shared["validation"], shared["test"])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ls.UserError, match="needs pandas"):
        frontier.to_pandas()
    assert len(set(map(len, frontier.to_dict().values()))) == 1


@pytest.mark.parametrize(("kind", "begins"), [("png", b"\x89PNG"), ("svg", b"<svg"), ("pdf", b"%PDF")])
def test_a_chart_is_saved(kind: str, begins: bytes, shared: dict[str, Any], tmp_path: Path) -> None:
    chart = ls.sweep("margin", shared["validation"], shared["test"]).plot()
    chart.save(tmp_path / f"f.{kind}")
    assert (tmp_path / f"f.{kind}").read_bytes().startswith(begins)
    with pytest.raises(ls.UserError, match="choose one of png, svg, pdf"):
        chart.save(tmp_path / "f.docx")


def test_a_policy_takes_arrays(shared: dict[str, Any]) -> None:
    test, policy = shared["test"], ls.ExitPolicy("gate", 0.5)
    assert (policy.exit_loops(logits=test.logits, gate_logits=test.gate_logits) == policy.exit_loops(test)).all()
    with pytest.raises(ls.UserError, match="no gate"):
        policy.exit_loops(logits=test.logits)
    with pytest.raises(ls.UserError, match="not both"):
        policy.exit_loops(test, logits=test.logits)


def test_rows_of_tokens_run_as_requests_do(shared: dict[str, Any]) -> None:
    model, policy = shared["model"], ls.ExitPolicy("gate", 0.6)
    tokens = np.random.default_rng(0).integers(0, 8, (20, 5))
    told = {answer.key: (answer.loop, answer.prediction) for answer in ls.run(model, tokens, policy)}
    asked = [ls.Request(key, [row]) for key, row in enumerate(tokens)]
    assert told == {answer.key: (answer.loop, answer.prediction) for answer in ls.run(model, asked, policy)}
    assert len({loop for loop, _ in told.values()}) > 1
    recorded = ls.record_model(model, tokens)
    assert [told[key][0] for key in range(20)] == policy.exit_loops(recorded).tolist()
    ragged = [[1, 2], np.array([3, 4, 5])]
    assert {answer.key for answer in ls.run(model, ragged, policy)} == {0, 1}
    with pytest.raises(ls.UserError, match="row of tokens"):
        list(ls.run(model, [1, 2, 3], policy))
