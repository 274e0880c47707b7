"""Every exercise of the notebooks: right functions pass, usual mistakes are named, stubs get no traceback."""

import pytest

from rlhelpers import exercises as checks
from rlhelpers.exercises.exercise import Exercise

EXERCISES = {name: getattr(checks, name) for name in checks.__all__}
SLOW = {"grpo_train_step": pytest.mark.slow}
NAMES = [pytest.param(name, marks=SLOW.get(name, ())) for name in EXERCISES]
MISTAKES = [
    pytest.param(name, mistake, marks=SLOW.get(name, ()))
    for name, exercise in EXERCISES.items()
    for mistake in exercise.mistakes
]
pytestmark = pytest.mark.usefixtures("one_thread")


def test_all_are_exercises_under_their_own_names():
    assert EXERCISES
    for name, exercise in EXERCISES.items():
        assert isinstance(exercise, Exercise) and exercise.name == name


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_passes(name, capsys):
    assert EXERCISES[name](EXERCISES[name].reference) == 1
    report = capsys.readouterr().out
    assert report.count("  holds  ") == len(EXERCISES[name].properties) and "FAILS" not in report


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_a_usual_mistake_is_named(name, mistake, capsys):
    exercise = EXERCISES[name]
    assert exercise(exercise.mistakes[mistake]) < 1
    report = capsys.readouterr().out
    assert f"This is what comes of {mistake}." in report
    assert all(word in report for word in ("FAILS", "wanted", "got"))


@pytest.mark.parametrize("name", NAMES)
def test_a_stub_is_not_written_yet(name, capsys):
    def raises(*arguments, **settings):
        raise NotImplementedError()

    for stub in (raises, lambda *arguments, **settings: None):
        assert EXERCISES[name](stub) == 0
        assert capsys.readouterr().out == f"{name}: not written yet\n"


@pytest.mark.parametrize("name", NAMES)
def test_an_error_of_the_reader_is_shown_with_its_input(name, capsys):
    def broken(*arguments, **settings):
        raise KeyError("no such key")

    assert EXERCISES[name](broken) == 0
    report = capsys.readouterr().out
    assert "got     an error, KeyError: 'no such key'" in report and "wanted" in report


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_function_is_reported_too(name, capsys):
    assert EXERCISES[name]("text") == 0
    assert "an error, TypeError" in capsys.readouterr().out
