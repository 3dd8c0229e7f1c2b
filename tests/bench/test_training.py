"""The measure of training: is only useful arithmetic counted?"""

import numpy as np
from conftest import tiny_settings

from loopscope.bench.measure import spread
from loopscope.bench.training import _positions, useful_flops
from loopscope.tasks import Examples


def test_arithmetic_by_hand() -> None:
    """Two rows, 1-2-3 and 1-2: three states, since the second is the beginning of the first."""
    settings = tiny_settings("model.loops=2")  # one layer of width 16, vocabulary 8
    tokens, lengths = np.array([[1, 2, 3], [1, 2, 0]]), np.array([3, 2])
    batch = Examples(tokens, lengths, np.array([0, 1]), np.array([1, 1]))
    width, states = 16, 3
    one_layer = 2 * 12 * width**2 * states + 4 * width * (1 + 2 + 3)
    last_layer = 2 * 2 * width**2 * states + 2 * 10 * width**2 * 2 + 4 * width * (3 + 2)
    head = 2 * 2 * 2 * width * 8
    assert useful_flops(settings, batch, _positions(batch)) == 3 * (one_layer + last_layer + head)


def test_spread() -> None:
    assert str(spread([1, 2, 3, 4, 5])) == "3 [2, 4]"
