"""Bars where they move, lines where they do not, and a tracker that never stops a run."""

import io
import sys
import types

import pytest

from rlhelpers.training import console
from rlhelpers.training.config import make_config
from rlhelpers.training.console import Progress, Tracker


def test_one_line_per_step_where_nothing_can_move(capsys):
    with Progress(10) as shown:
        shown.show({"step": 0, "val_reward": 0.25, "seconds": 1.0})
        shown.show({"step": 1, "reward": 0.5, "format_reward": 0.75, "response_length": 31.26, "seconds": 2.0})
        shown.say("a remark")
    assert capsys.readouterr().out.splitlines() == [
        "step  0/10  val_reward 0.250  seconds 1.0",
        "step  1/10  reward 0.500  format 0.750  length 31.3  seconds 2.0",
        "a remark",
    ]


def test_a_bar_where_it_can_move(monkeypatch, capsys):
    monkeypatch.setattr(console, "bar_can_move", lambda: True)
    with Progress(2) as shown:
        for step in range(3):
            shown.show({"step": step, "reward": 0.5})
    out, err = capsys.readouterr()
    assert "2/2" in err and "reward 0.500" in err and out == ""


@pytest.mark.field_report("D15")
def test_a_thousand_steps_are_a_thousand_short_lines(monkeypatch):
    """So that an executed notebook stays below a megabyte; each line is there when its step is."""
    written = io.StringIO()
    flushed = []
    monkeypatch.setattr(written, "flush", lambda: flushed.append(written.getvalue().count("\n")), raising=False)
    monkeypatch.setattr(sys, "stdout", written)
    with Progress(1000) as progress:
        for step in range(1, 1001):
            progress.show({"step": step, "reward": 0.5, "format_reward": 0.5, "response_length": 30.0, "seconds": 1.0})
    text = written.getvalue()
    assert flushed == list(range(1, 1001)) and "\r" not in text and len(text) < 200_000


def fake_library(monkeypatch, **functions):
    library = types.ModuleType("trackio")
    for name in ("init", "log", "finish"):
        setattr(library, name, functions.get(name, lambda *_, **__: None))
    monkeypatch.setitem(sys.modules, "trackio", library)


def test_a_tracker_gets_every_step(monkeypatch):
    logged = []
    fake_library(monkeypatch, log=lambda metrics, step: logged.append((step, metrics)))
    tracker = Tracker(make_config(tracker="trackio"))
    tracker.log({"step": 3, "reward": 0.5})
    tracker.close()
    assert logged == [(3, {"step": 3, "reward": 0.5})]


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("no network"), SystemExit(1)])
def test_a_broken_tracker_warns_once_and_is_off(monkeypatch, broken, error):
    def fail(*_, **__):
        raise error

    fake_library(monkeypatch, **{broken: fail})
    with pytest.warns(UserWarning, match=f"tracker: {broken} failed") as warned:
        tracker = Tracker(make_config(tracker="trackio"))
        tracker.log({"step": 1})
        tracker.log({"step": 2})
        tracker.close()
    assert len(warned) == 1


def test_a_folder_of_the_library_s_name_warns(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", types.ModuleType("trackio"))
    with pytest.warns(UserWarning, match="tracker: init failed"):
        Tracker(make_config(tracker="trackio")).log({"step": 1})


def test_a_tracker_that_is_not_installed_warns(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.warns(UserWarning, match="tracker: import failed"):
        Tracker(make_config(tracker="wandb")).log({"step": 1})


def test_no_tracker_by_default(recwarn):
    Tracker(make_config()).log({"step": 1})
    assert not recwarn.list
