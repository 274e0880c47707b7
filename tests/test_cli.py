"""The command `rlhelpers`."""

import re

import pytest

from rlhelpers import cli, paths
from rlhelpers.tasks import gsm8k
from rlhelpers.tiny import model as tiny_model


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


GRPO = str(paths.ROOT / "notebooks/04_grpo.ipynb")
BAD = [
    *(
        [],
        ["nothing"],
        ["--version"],
        ["doctor", "--preset"],
        ["doctor", "--preset", "huge"],
        ["doctor", "--seed", "1"],
    ),
    *(["doctor", "seed"], ["doctor", "=3"], ["doctor", "seed=1", "seed=2"], ["doctor", "seed=x"], ["doctor", "sede=1"]),
    *(["doctor", "learning_rate=1e999"], ["doctor", "max_tokens=True"], ["doctor", "betas=" + "(" * 9999]),
    *(["fetch"], ["fetch", "mnist"], ["fetch", "gsm8k", "again"]),
    *(["tiny", "here"], ["tiny", "--folder"], ["tiny", "--folder", ""], ["tiny", "--folder", "a file"]),
    *(["bench"], ["bench", "nothing"], ["bench", "engines", "--engines"], ["bench", "engines", "--engines", "vlm"]),
    *(
        ["bench", "ahead", "1"],
        ["bench", "long", "--steps", "0"],
        ["bench", "grader", "no.jsonl"],
        ["bench", "grader", "."],
    ),
    *(["bench", "grader", "--course", "no.py"], ["bench", "rollouts", "1"], ["bench", "step", "--rounds", "1"]),
    *(["bench", "whole-step", "1"], ["bench", "long", "--steps", "1e3"], ["bench", "long", "--steps", "-1"]),
    *(["bench", "logprobs", "1"], ["bench", "imports", "1"]),
    *(
        ["bench", "growth", "1"],
        ["bench", "contention", "1"],
        ["bench", "readme", "1"],
        ["bench", "gpu", "--device", "tpu"],
    ),
    *(["collect", "../up"], ["collect", ""], ["collect", "nothing"], ["collect", "--all"], ["writeup", "1"]),
    *(["sweep"], ["sweep", "no.ipynb"], ["sweep", "."], ["sweep", "a file"], ["sweep", GRPO, "--seeds"]),
    *(["sweep", GRPO, "--seeds", "x"], ["sweep", GRPO, "--seeds", ""], ["sweep", GRPO, "--seeds=-1"]),
    *(["sweep", GRPO, "-p", "seed"], ["sweep", GRPO, "-p", "=1"], ["sweep", GRPO, "-p", "task=tinny"]),
    *(
        ["sweep", GRPO, "-p", "betas=(0.9,nan)"],
        ["sweep", GRPO, "-p", "max_tokens=4096"],
        ["sweep", GRPO, "--jobs", "0"],
    ),
    *(["sweep", GRPO, "--jobs", "0"], ["sweep", GRPO, "--engine", "slurm"], ["sweep", GRPO, "--gpus-per-run", "-1"]),
    *(["exercises"], ["exercises", ""], ["exercises", "one", "two"]),
    *(["evaluate"], ["evaluate", "arc", "--data", "."], ["evaluate", "mmlu"], ["evaluate", "mmlu", "--data", "no"]),
    *(["evaluate", "mmlu", "--data", "a file"], ["evaluate", "gsm8k", "--data", "a file", "--max-tokens", "0"]),
    *(["judge"], ["judge", "no", "--url", "http://127.0.0.1:1/v1", "--model", "m"], ["judge", ".", "--url", "x"]),
]


@pytest.mark.parametrize("arguments", BAD, ids=lambda arguments: " ".join(arguments).replace(GRPO, "04")[:40])
def test_bad_arguments_are_exit_2_and_a_line_each(roots, tmp_path, monkeypatch, capsys, arguments):
    """And nothing is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").touch()
    try:
        status = cli.main(arguments)
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert status == 2 and not out
    assert err.startswith("rlhelpers") and err.count("\n") <= 2 and err.endswith("\n") and "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["a file"]


def test_every_command_has_bad_arguments_above(capsys):
    for command, of in ((["--help"], 0), (["bench", "--help"], 1)):
        with pytest.raises(SystemExit):
            cli.main(command)
        commands = re.findall(r"^    ([a-z][a-z-]+)", capsys.readouterr().out, re.MULTILINE)
        assert len(commands) > 6 and set(commands) <= {arguments[of] for arguments in BAD if len(arguments) > of}
