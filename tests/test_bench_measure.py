"""How benches measure: turns, spreads, clock, memory."""

import os

import pytest
import torch

from rlhelpers.bench.measure import Clock, PeakMemory, Spread, compare_seconds, in_own_process, in_turns


def test_turns_alternate():
    order = []
    turns = {name: lambda number, name=name: order.append((name, number)) or number for name in "ab"}
    assert in_turns(turns, 2) == {"a": [1, 2], "b": [1, 2]}
    assert order == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_spread():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of_ratios([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == Spread(2.0, 1.0, 3.0)


def test_ratios_are_taken_round_by_round():
    found = compare_seconds({"a": [1.0, 2.0, 4.0], "b": [2.0, 2.0, 12.0]})
    assert found["a"]["time_ratio"] == Spread(1.0, 1.0, 1.0)
    assert found["b"] == {"seconds": Spread(2.0, 2.0, 12.0), "time_ratio": Spread(2.0, 1.0, 3.0)}


def test_the_clock_counts_this_process():
    with Clock() as clock:
        sum(i * i for i in range(100_000))
    assert clock.seconds > 0 and clock.cores >= 0


def test_memory_is_what_came_on_top():
    with PeakMemory() as memory:
        block = torch.ones(64, 2**20 // 4)  # 64 MiB
        del block
    assert 60 * 2**20 < memory.extra < 128 * 2**20


@pytest.mark.slow
def test_in_a_process_of_its_own():
    assert in_own_process(os.getpid) != os.getpid()
    with pytest.raises(ZeroDivisionError):
        in_own_process(divmod, 1, 0)
