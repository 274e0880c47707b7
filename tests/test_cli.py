"""The command `rlhelpers`."""

import pytest

from rlhelpers import cli
from rlhelpers.tasks import gsm8k
from rlhelpers.training import tiny_model


def test_fetch(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(gsm8k, "fetch_gsm8k", lambda: calls.append("fetched"))
    assert cli.main(["fetch", "gsm8k"]) == 0 and calls == ["fetched"]
    assert "GSM8K is in" in capsys.readouterr().out


def test_tiny_writes_where_it_is_told(monkeypatch):
    folders = []
    monkeypatch.setattr(tiny_model, "make_tiny", folders.append)
    assert cli.main(["tiny", "--folder", "elsewhere"]) == 0 and folders == ["elsewhere"]


def test_an_error_is_one_line_and_exit_1(monkeypatch, capsys):
    def fail():
        raise ConnectionError("no network")

    monkeypatch.setattr(gsm8k, "fetch_gsm8k", fail)
    assert cli.main(["fetch", "gsm8k"]) == 1
    assert capsys.readouterr().err == "rlhelpers: no network\n"


@pytest.mark.parametrize("arguments", [[], ["fetch", "mnist"], ["nothing"]])
def test_unknown_commands_say_what_is_accepted(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("rlhelpers") and line.endswith("--help says more")
