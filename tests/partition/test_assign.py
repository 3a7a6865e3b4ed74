"""Who does which job: pure, complete, balanced."""

import numpy as np
import pytest

from jaxzero._src.partition.assign import assign


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_every_job_once_and_balanced(n):
    rng = np.random.default_rng(n)
    for _ in range(50):
        kinds = [(int(rng.integers(1, 30)), float(rng.integers(1, 100))) for _ in range(rng.integers(1, 6))]
        plan = assign(kinds, n)
        done = sorted(slot for device in range(n) for slot in plan.slots(device))
        assert done == sorted((kind, i) for kind, (count, _) in enumerate(kinds) for i in range(count))
        for device in range(n):
            assert plan.loads[device] == pytest.approx(sum(kinds[kind][1] for kind, _ in plan.slots(device)))
        total, largest = sum(c * cost for c, cost in kinds), max(cost for _, cost in kinds)
        assert max(plan.loads) <= total / n + largest
        assert plan == assign(list(kinds), n)


def test_full_rounds_are_the_same_on_all_devices():
    plan = assign([(8, 1.0), (4, 3.0)], 4)
    kinds = [[kind for kind, _ in plan.slots(device)] for device in range(4)]
    assert kinds == [[0, 0, 1]] * 4
    assert plan.balance == 1.0
    assert assign([(1, 5.0)], 4).balance == 4.0
