"""The spacing of drafts: does it bring the most tokens a second, and is drafting given up where none does?"""

import pytest
from tiny_language import MODELS, tiny_ouro

from loopscope.engine.draft_spacing import DraftSpacing, Spacing, StepSeconds
from loopscope.models.looped_model import LoopedModel


class Machine(StepSeconds):
    """Where a loop of n tokens takes 1 + `more` (n - 1), and what is read `head` whatever it is."""

    def __init__(self, model: LoopedModel, more: float, head: float) -> None:
        super().__init__(model)
        for loops in (1, 2, 3, 4):
            for tokens in range(1, 65):
                self.see_loops(loops, tokens, False, loops * (1 + more * (tokens - 1)))
        for read in range(1, 65):
            self.see_rest(read, head)


def drafting(more: float, head: float = 0.1, model: LoopedModel | None = None) -> DraftSpacing:
    spacing = DraftSpacing(model or tiny_ouro())
    spacing.seconds = Machine(tiny_ouro(), more, head)
    return spacing


def write(spacing: DraftSpacing, rows: int, standing: list[float], tokens: int = 60) -> list[Spacing]:
    """The spacings of so many tokens, of which loop l says the next with the share `standing[l - 1]`."""
    chosen, right = [], [0.0] * len(standing)
    for _ in range(tokens):
        chosen.append(spacing.choose(rows, 1, False))
        answers = {}
        for place, share in enumerate(standing):
            right[place] += share
            answers[place + 1] = 7 if right[place] >= 1 else 8
            right[place] %= 1
        loops, early = chosen[-1]
        read = {4} | {loops} | set(range(loops, 5, loops) if early else ())
        for _ in range(rows):
            spacing.count({loop: answer for loop, answer in answers.items() if loop in read}, 7, 1)
            spacing.count_token()
    return chosen


def test_drafts_come_soon_where_they_stand_and_tokens_together_cost_little() -> None:
    assert write(drafting(0.02), 1, [0.9, 0.9, 0.9, 1.0])[-1].loops == 1
    assert write(drafting(0.02), 8, [0.9, 0.9, 0.9, 1.0])[-1].loops == 1
    assert write(drafting(0.02, head=1.0), 1, [0.3, 0.95, 0.95, 1.0])[-1] == Spacing(2)  # later ones stand more often
    assert write(drafting(0.02, head=6.0), 1, [0.9, 0.9, 0.9, 1.0])[-1] == Spacing(2)  # and need fewer heads
    assert write(drafting(0.02), 1, [0.5, 0.9, 1.0, 1.0])[-1].early  # what a deeper loop would not say is replaced


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_nothing_is_drafted_where_that_does_not_pay(rows: int) -> None:
    full = Spacing(4)
    assert set(write(drafting(1.0), rows, [0.95, 0.95, 0.95, 1.0])) == {full}  # every token costs as much as the first
    spacing = drafting(0.02)
    chosen = write(spacing, rows, [0.0, 0.0, 0.0, 1.0], 400)
    assert chosen[0] != full
    assert chosen[-1] == full
    tried = [place for place, each in enumerate(chosen) if each != full]
    assert 0 < len([place for place in tried if place > 100]) < 80  # it is tried again, more and more seldom
    assert write(spacing, rows, [0.95, 0.95, 0.95, 1.0], 600)[-1] != full  # and kept where text has become easier


def test_a_policy_is_asked_after_every_loop_or_not_at_all() -> None:
    spacing = drafting(0.02, head=2.0)
    assert {spacing.choose(rows, 1, True).loops for rows in range(1, 9)} <= {1, 4}
    assert drafting(0.02, head=6.0).choose(1, 1, False) == Spacing(2)
    assert drafting(0.02).choose(1, 3, False).loops == 1  # a draft at loop 3 has no place in steps of two
    for _ in range(80):
        spacing.choose(2, 1, True)
        spacing.count_begun(4)
        spacing.count_token()
    assert spacing.choose(2, 1, True) == spacing.full_depth


def test_what_a_step_takes_is_remembered_and_estimated() -> None:
    seconds = StepSeconds(tiny_ouro())
    before = seconds.estimate(1, 1, 1)
    assert seconds.estimate(4, 1, 1) > before  # by the sizes of its matrices
    seconds.see_loops(1, 4, True, 8.0)
    seconds.see_rest(2, 1.0)
    assert seconds.estimate(1, 4, 2) == 9.0
    assert seconds.estimate(2, 4, 2) == 17.0
    assert 8.0 < seconds.estimate(1, 16, 2) - 1.0 < 16.0
    for _ in range(2):
        seconds.see_loops(1, 4, True, 16.0)
    assert 9.5 < seconds.estimate(1, 4, 2) < 10  # one slow step says little
    seconds.see_loops(1, 4, True, 2.0)
    assert seconds.estimate(1, 4, 2) == 3.0


def test_a_head_that_attends_reads_no_drafts_between() -> None:
    assert not any(each.early for each in DraftSpacing(MODELS["coda"]())._drafting)
    assert any(each.early for each in DraftSpacing(tiny_ouro())._drafting)


def test_texts_of_a_model_know_what_those_before_them_took() -> None:
    model = tiny_ouro()
    assert DraftSpacing(model).seconds is DraftSpacing(model).seconds
    assert DraftSpacing(tiny_ouro()).seconds is not DraftSpacing(model).seconds


def test_texts_of_a_model_know_what_became_of_the_drafts_before_them() -> None:
    model = tiny_ouro()
    texts = [write(drafting(0.02, model=model), 4, [0.0, 0.0, 0.0, 1.0]) for _ in range(4)]
    tried = [sum(spacing != Spacing(4) for spacing in chosen) for chosen in texts]
    assert texts[0][0] != Spacing(4)
    assert 0 < tried[0] < 20  # of 60 steps: a few tokens of four rows say enough of each spacing
    assert sum(tried[1:]) < tried[0]
    assert drafting(0.02, model=model).choose(4, 1, True) == Spacing(1)  # a policy drafts otherwise
