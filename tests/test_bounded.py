"""Waiting that ends."""

import threading

import pytest

from rlhelpers.rollouts import EngineDeadError
from rlhelpers.rollouts.processes import bounded


@pytest.fixture
def never():
    """An event that nothing sets before the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_the_result_comes_through_also_none():
    assert bounded(lambda: 5) == 5
    assert bounded(lambda: None, seconds=10) is None


def test_the_actions_own_error_comes_through():
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 / 0)


def test_time_is_up(never):
    with pytest.raises(EngineDeadError, match=r"did not answer within 0\.1 s"):
        bounded(never.wait, seconds=0.1)


def test_nobody_is_left_to_answer(never):
    with pytest.raises(EngineDeadError, match="process is gone"):
        bounded(never.wait, is_dead=lambda: True)


def test_an_answer_of_one_who_then_died_counts():
    assert bounded(lambda: 5, is_dead=lambda: True) == 5
