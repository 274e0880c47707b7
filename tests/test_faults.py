"""What goes wrong during a run, and that nothing is lost by it: a full disk, SIGTERM, a reward function that raises,
losses that are no numbers, memory that runs out, and two runs at once.  SIGKILL is in test_resume."""

import copy
import math
import resource
import signal
import textwrap
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from jupyter_client.manager import start_new_kernel
from killable import limit_files, start, write_model
from processes import is_alive, wait_until
from safetensors.torch import save_file
from small_runs import FOLDER, SMALL, assert_same, contents, read_about, without_times

from rlhelpers import paths
from rlhelpers.bench import runs as whole_runs
from rlhelpers.evidence.figures import save_for_writeup
from rlhelpers.evidence.runs import complete_runs, read_jsonl, read_metrics
from rlhelpers.evidence.statistics import read_signs
from rlhelpers.files import NotWrittenError, append, whole_folder, write_atomically
from rlhelpers.kernels import grpo_train_step, microbatches, train_step
from rlhelpers.kernels.estimators import AGGREGATIONS
from rlhelpers.tasks import Grader
from rlhelpers.training import loop
from rlhelpers.training.config import make_config
from rlhelpers.training.loop import train
from rlhelpers.training.run_folder import run_state
from rlhelpers.training.updates import MAX_SKIPPED, DivergedError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return SMALL | {"model": str(folder)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, settings):
    """The run that nothing happens to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RUNS", tmp_path_factory.mktemp("whole"))
        return train(make_config(**settings))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    return tmp_path


def output(runs):
    return (runs / "output.txt").read_text(encoding="utf-8")


def lines_of(folder):
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "file", "state"),
    [
        (("full before metrics", 5), "metrics.jsonl", "failed"),
        (("full before responses", 6), "step_00004_train.jsonl", "killed"),  # nor was there room to say "failed"
        (("full before a checkpoint", 2), "step_00004", "killed"),
        (("full before the policy", 1), "policy", "killed"),
        (("full before the time is taken", 2), "run.json", "killed"),
    ],
    ids=str,
)
def test_a_full_disk_names_the_file_and_the_run_goes_on_when_there_is_room(runs, settings, whole, moment, file, state):
    process = start(runs, settings, moment)
    process.join(120)
    [said] = [line for line in output(runs).splitlines() if line.startswith("NotWrittenError: ")]
    assert process.exitcode == 1 and f"/{file}" in said and "could not be written" in said
    folder = runs / FOLDER
    assert run_state(folder).status == state
    for path in [*folder.rglob("*.jsonl")]:
        assert all(isinstance(row, dict) for row in read_jsonl(path)) and path.read_bytes().endswith(b"\n")
    assert not [path for path in folder.rglob("*.tmp*")]
    process = start(runs, settings | {"resume": True})
    process.join(120)
    assert process.exitcode == 0
    assert_same(folder, whole)


@contextmanager
def full_disk(room=20):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit_files(room)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def a_folder(write):
    def write_folder(path):
        with whole_folder(path) as new:
            write(new)

    return write_folder


TENSOR = {"a": torch.zeros(2000)}


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda path: write_atomically(path, "x" * 100), "File too large"),
        (lambda path: append(path, "x" * 100), "File too large"),
        (a_folder(lambda new: save_file(TENSOR, new / "a")), "SafetensorError: .*File too large.*"),
        (a_folder(lambda new: torch.save(TENSOR, new / "a")), "RuntimeError: .*"),
        (lambda path: save_for_writeup(plt.figure(), path.stem), "File too large"),
    ],
    ids=["text", "lines", "weights", "state", "figure"],
)
def test_every_writer_leaves_what_was_there_and_says_what_it_could_not_write(tmp_path, monkeypatch, write, says):
    monkeypatch.setattr(paths, "FIGURES", tmp_path)
    path = tmp_path / "name.png"
    is_folder = "a_folder" in write.__qualname__
    if is_folder:
        path.mkdir()
    old = path / "old" if is_folder else path
    old.write_text("old", encoding="utf-8")
    with full_disk(), pytest.raises(NotWrittenError, match=rf"^{path}\S*: could not be written \({says}; .* MiB"):
        write(path)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [old]
    assert old.read_text(encoding="utf-8") == "old"
    write(path)  # there is room again
    assert (path / "a").exists() if is_folder else old.read_bytes() != b"old"


# --- SIGTERM and SIGINT ----------------------------------------------------------------------------------------------


def test_sigterm_leaves_whole_files_and_the_run_goes_on_bit_for_bit(runs, settings, whole):
    folder = runs / FOLDER
    process = start(runs, settings)
    wait_until(lambda: lines_of(folder) >= 4)
    process.terminate()
    process.join(60)
    assert process.exitcode == -signal.SIGTERM  # 143 in a shell
    about = read_about(folder)
    assert (about["status"], about["error"]) == ("killed", "Terminated: SIGTERM") and "finished" in about
    assert run_state(folder).status == "killed" and not list(folder.rglob("*.tmp"))
    process = start(runs, settings | {"resume": True})
    process.join(120)
    assert_same(folder, whole)
    assert len(read_about(folder)["resumed"]) == 1 and "error" not in read_about(folder)


def test_a_notebook_that_is_interrupted_and_then_terminated(runs, settings, whole):
    """By Jupyter's stop button, and then, while it goes on, by SIGTERM: the kernel ends."""
    folder = runs / FOLDER
    marker = runs / "in step 4"
    plain = {name: value for name, value in settings.items() if name != "estimator"}
    program = f"""
        import sys, torch
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from killable import PUSH
        from rlhelpers import paths
        from rlhelpers.training import loop, config
        paths.RUNS = Path({str(runs)!r})
        torch.set_num_threads(1)
        original = loop.Run.step
        def slow(run, step):  # so that it does not end before the signal comes
            import time
            if step == 4:
                Path({str(marker)!r}).touch()
                time.sleep(60)
            return original(run, step)
        loop.Run.step = slow
        loop.train(config.make_config(estimator=PUSH, resume=True, **{plain!r}))
    """
    kernel, client = start_new_kernel()
    try:
        pid = kernel.provisioner.process.pid
        asked = client.execute(textwrap.dedent(program))
        wait_until(marker.exists)
        marker.unlink()
        kernel.interrupt_kernel()
        while (reply := client.get_shell_msg(timeout=60))["parent_header"]["msg_id"] != asked:
            pass
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert read_about(folder)["status"] == "failed" and read_about(folder)["error"].startswith("KeyboardInterrupt")
        client.execute("loop.train(config.make_config(estimator=PUSH, resume=True, **%r))" % plain)  # noqa: UP031
        wait_until(marker.exists)
        kernel.signal_kernel(signal.SIGTERM)
        wait_until(lambda: not is_alive(pid))
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    assert read_about(folder)["status"] == "killed"
    train(make_config(**settings | {"resume": True}))
    assert_same(folder, whole)
    assert [entry["step"] for entry in read_about(folder)["resumed"]] == [2, 2]


# --- a reward function that raises -----------------------------------------------------------------------------------


def test_a_reward_function_that_raises_is_an_error_that_names_the_response(tiny_gpt2, tokenizer):
    def reward_fn(response, ground_truth):
        return {"reward": 1.0 / len(response.split()), "format_reward": 1.0}

    model = tiny_gpt2()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"reward_fn: it raised for response 2, which begins '': ZeroDivisionError"):
        responses = ["a", "b c", "", "d"]
        grpo_train_step(model, tokenizer, optimizer, 1, None, reward_fn, ["a"] * 4, responses, ["1"] * 4, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_run_over_such_a_response_keeps_the_batch_stops_and_goes_on(runs, settings, whole, monkeypatch, capsys):
    def failing(self, response, ground_truth):
        calls.append(response)
        if len(calls) == 2 + 16 + 2 + 11:  # validation, step 1, validation, and in step 2
            raise TypeError("no number")
        return original(self, response, ground_truth)

    calls, original = [], Grader.grade
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"it raised for response 10.*TypeError"):
        patch.setattr(Grader, "grade", failing)
        train(make_config(**settings | {"eval_every": 1}))
    folder = runs / FOLDER
    about = read_about(folder)
    said = "The grading of step 2 failed; its batch is in bad_batches/step_00002_grading.jsonl."
    assert about["status"] == "failed" and "response 10" in about["error"] and about["remarks"] == [said]
    assert said in capsys.readouterr().out
    rows = read_jsonl(folder / "bad_batches/step_00002_grading.jsonl")
    assert [row["response"] for row in rows[:11]] == calls[-11:] and len(rows) == 16
    assert all(len(row["response_token_ids"]) == len(row["log_probs"]) > 0 for row in rows)
    assert all(row["prompt"] and row["prompt_token_ids"] and row["ground_truth"] for row in rows)
    train(make_config(**settings | {"resume": True}))
    assert_same(folder, whole)


def test_an_update_that_raises_keeps_its_batch(runs, settings, monkeypatch):
    def failing(*arguments):
        calls.append(1)
        if len(calls) == 4:  # the second update of step 2
            raise RuntimeError("no kernel")
        return original(*arguments)

    calls, original = [], train_step.accumulate_gradient
    monkeypatch.setattr(train_step, "accumulate_gradient", failing)
    with pytest.raises(RuntimeError, match="no kernel"):
        train(make_config(**settings))
    said = "Update 2 of step 2 failed; its batch is in bad_batches/step_00002_update_2.jsonl."
    assert read_about(runs / FOLDER)["remarks"] == [said]
    assert len(read_jsonl(runs / FOLDER / "bad_batches/step_00002_update_2.jsonl")) == 8


# --- losses and gradients that are not finite ------------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", [None, 1.0, math.inf])
@pytest.mark.parametrize("explosion", [math.inf, -math.inf, math.nan])
def test_a_skipped_update_leaves_optimizer_and_weights_to_the_last_bit(
    tiny_gpt2, tokenizer, monkeypatch, explosion, max_grad_norm
):
    def exploding(*arguments):
        return aggregate(*arguments) * explosion

    def step():
        rewards = iter([1.0, 0.0] * 4)
        return grpo_train_step(
            *(model, tokenizer, optimizer, 2, max_grad_norm),
            lambda *_: {"reward": next(rewards), "format_reward": 1.0},
            *(["a"] * 8, ["b c", "d"] * 4, ["1"] * 8, 4),
        )[1]

    model, aggregate = tiny_gpt2(), AGGREGATIONS["sequence"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert step()["skipped_update"] == 0  # there is a momentum now
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    with monkeypatch.context() as patch:
        patch.setitem(AGGREGATIONS, "sequence", exploding)
        metadata = step()
    assert metadata["skipped_update"] == 1.0 and not math.isfinite(metadata["grad_norm"])
    after = [model.state_dict(), optimizer.state_dict()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())


@pytest.fixture
def explode(monkeypatch):
    """The loss of these steps is NaN."""

    def in_steps(*steps):
        def step(self, number):
            now.append(number)
            return original(self, number)

        def aggregate_loss(*arguments):
            return aggregate(*arguments) * (math.nan if now[-1] in steps else 1.0)

        now, original, aggregate = [], loop.Run.step, AGGREGATIONS["sequence"]
        monkeypatch.setattr(loop.Run, "step", step)
        monkeypatch.setitem(AGGREGATIONS, "sequence", aggregate_loss)

    return in_steps


def test_a_few_skipped_updates_are_counted_and_the_first_batch_is_kept(runs, settings, explode):
    explode(2)  # two updates
    folder = train(make_config(**settings))
    metrics = read_metrics(folder)
    assert metrics["skipped_update"].tolist()[1:] == [0, 1, 0, 0, 0]
    assert metrics["loss"].isna().tolist()[1:] == [False, True, False, False, False]
    assert read_signs(metrics).diverged
    assert "2 updates were skipped: their loss or gradient was not finite." in read_about(folder)["remarks"]
    [file] = (folder / "bad_batches").iterdir()
    rows = read_jsonl(file)
    assert file.name == "step_00002_update_1.jsonl" and len(rows) == 8
    assert {row["reward"] for row in rows} <= {0.0, 1.0} and {row["format_reward"] for row in rows} <= {0.0, 1.0}


def test_too_many_in_a_row_stop_the_run_and_name_the_first_batch(runs, settings, explode):
    """Also over a kill: of the four the first two are in the checkpoint that it goes on from."""
    assert MAX_SKIPPED == 3
    explode(2, 3)
    said = (
        "the last 4 updates were skipped.*the first of them was update 1 of step 2, whose batch is in "
        "bad_batches/step_00002_update_1.jsonl; the weights are still finite"
    )
    for resume in (False, True):
        with pytest.raises(DivergedError, match=said):
            train(make_config(**settings | {"resume": resume}))
        folder = runs / FOLDER
        assert read_metrics(folder).index.tolist() == [0, 1, 2, 3]  # what is known is in the log
        assert read_signs(read_metrics(folder)).diverged
        assert read_about(folder)["status"] == "failed" and "the last 4 updates" in read_about(folder)["error"]
    assert [entry["step"] for entry in read_about(folder)["resumed"]] == [2]
    with pytest.warns(UserWarning, match="seed=0 is left out: .* updates were skipped"):  # from a comparison
        assert list(complete_runs(runs / "quick")) == []


# --- memory that runs out --------------------------------------------------------------------------------------------


def gpu_is_full():
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def cpu_is_full():
    torch.empty(2**60, dtype=torch.uint8)  # an error of torch's own


class Memory:
    """Runs out before a forward pass of a model's body, so often, and where told not before there is a gradient."""

    def __init__(self, model, run_out, times, after_a_gradient=False):
        self.model, self.run_out, self.times, self.after, self.count = model, run_out, times, after_a_gradient, 0
        model.base_model.register_forward_pre_hook(self._look)

    def _look(self, *_):
        has_gradient = any(p.grad is not None for p in self.model.parameters())
        if self.count < self.times and (has_gradient or not self.after):
            self.count += 1
            self.run_out()


def step_in(model, tokenizer, steps):
    """Four groups of two; the gradient, and the metadata."""
    start, rewards = [p.detach().clone() for p in model.parameters()], iter([1.0, 0.0] * 4)
    _, metadata = grpo_train_step(
        *(model, tokenizer, torch.optim.SGD(model.parameters(), lr=1.0), steps, None),
        lambda *_: {"reward": next(rewards), "format_reward": 1.0},
        *([p for p in "abcd" for _ in range(2)], ["b c", "d", "e f g", "a", "h i", "b", "c d e f", "k l m"]),
        *(["1"] * 8, 2),
    )
    now = (p.detach() for p in model.parameters())
    return torch.cat([(a - b).flatten() for a, b in zip(start, now, strict=True)]), metadata


@pytest.mark.parametrize("run_out", [gpu_is_full, cpu_is_full])
def test_smaller_microbatches_give_the_gradient_of_an_update_without_the_fault(tiny_gpt2, tokenizer, run_out):
    """What the microbatches before the fault have added is not counted twice."""
    undisturbed, _ = step_in(tiny_gpt2(), tokenizer, 2)
    smaller, metadata = step_in(tiny_gpt2(), tokenizer, 4)
    assert metadata["gradient_accumulation_steps"] == 4
    model = tiny_gpt2()
    memory = Memory(model, run_out, 1, after_a_gradient=True)
    with pytest.warns(UserWarning, match=r"up to 4 of 8 rows.*gradient_accumulation_steps=4 instead of 2, which as"):
        found, metadata = step_in(model, tokenizer, 2)
    assert memory.count == 1
    assert torch.equal(found, smaller) and metadata["gradient_accumulation_steps"] == 4
    torch.testing.assert_close(found, undisturbed, rtol=1e-10, atol=1e-12)


def test_a_row_that_does_not_fit_alone_is_an_error_and_so_is_any_other(tiny_gpt2, tokenizer):
    def other():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    for run_out, kind in (
        (gpu_is_full, torch.cuda.OutOfMemoryError),
        (cpu_is_full, RuntimeError),
        (other, RuntimeError),
    ):
        model = tiny_gpt2()
        before, memory = copy.deepcopy(model.state_dict()), Memory(model, run_out, 100, after_a_gradient=True)
        with warnings.catch_warnings(record=True) as said, pytest.raises(kind):
            warnings.simplefilter("always")
            step_in(model, tokenizer, 2)
        assert memory.count == len(said) + 1 == (1 if run_out is other else 3)  # 2, 4, 8
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())


def test_a_run_keeps_the_smaller_microbatches_and_says_so_once(runs, settings, monkeypatch):
    """Also when it goes on."""

    def accumulate(*arguments):
        steps.append(arguments[-1])
        if arguments[-1] < 4:
            gpu_is_full()
        return original(*arguments)

    def failing(self, number):
        if number == 4:
            raise KeyboardInterrupt
        return step(self, number)

    steps, original, step = [], train_step.accumulate_gradient, loop.Run.step
    monkeypatch.setattr(train_step, "accumulate_gradient", accumulate)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="ran out"):
        patch.setattr(loop.Run, "step", failing)
        train(make_config(**settings | {"checkpoint_every": 1}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        folder = train(make_config(**settings | {"checkpoint_every": 1, "resume": True}))
    assert steps == [2] + [4] * 10
    said = "Memory ran out: from step 1 on gradient_accumulation_steps=4, not 2."
    assert read_about(folder)["remarks"] == [said]
    assert read_metrics(folder)["gradient_accumulation_steps"].tolist()[1:] == [4] * 5


def test_only_memory_is_taken_for_memory():
    assert microbatches.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as caught:
        cpu_is_full()
    assert microbatches.is_out_of_memory(caught.value)
    assert not microbatches.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))


# --- two runs at once, and a long one --------------------------------------------------------------------------------


def test_of_two_runs_of_one_name_one_gets_the_folder_and_the_other_is_told_who_has_it(runs, settings):
    two = [start(runs, settings, ("slow", 1)) for _ in range(2)]
    other = start(runs, settings | {"variant": "other"})
    for process in (*two, other):
        process.join(120)
    assert sorted(process.exitcode for process in two) == [0, 1] and other.exitcode == 0
    [winner] = [process for process in two if process.exitcode == 0]
    [said] = [line for line in output(runs).splitlines() if line.startswith("RuntimeError: ")]
    assert f"another process is writing this run (process {winner.pid} on " in said
    folders = [runs / "quick" / variant / "seed=0" for variant in ("killed", "other")]
    for folder in folders:
        assert read_about(folder)["status"] == "complete" and not list(folder.parent.glob(".*.writer"))
        assert read_metrics(folder).index.tolist() == [0, 1, 2, 3, 4, 5]
        assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["seed=0"]
    assert without_times(folders[0]).equals(without_times(folders[1]))
    assert contents(folders[0] / "policy") == contents(folders[1] / "policy")


def test_sixty_steps_take_no_more_memory_or_files_than_thirty(runs, settings):
    started = time.monotonic()
    report = whole_runs.bench_long(60, model=settings["model"])
    assert report.settings["steps_in_the_log"] == 60 and report.settings["each_step_once"]
    assert report.settings["seconds"] <= time.monotonic() - started
    first, half, last = report.rows
    assert 3 <= first["after_step"] <= half["after_step"] <= last["after_step"] <= 60 and half["after_step"] >= 30
    assert last["memory_MiB"] < half["memory_MiB"] + 8
    assert last["open_files"] <= half["open_files"] + 1  # the one that it may be writing
    assert "each step once: yes" in str(report)
