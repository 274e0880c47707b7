"""The benchmark for GPUs at a size that the CPU can do: that variants do what they say, and what is refused."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rlhelpers import cli, paths
from rlhelpers.bench import gpu, variants
from rlhelpers.bench.gpu import matrix_rate
from rlhelpers.bench.measure import Read, Spread, reading
from rlhelpers.bench.report import Report
from rlhelpers.bench.variants import GradientKeeper, ladder, microbatches, training_flops
from rlhelpers.doctor.machine import OLMO_1B
from rlhelpers.doctor.memory import GIB, Architecture
from rlhelpers.kernels import logprobs

pytestmark = pytest.mark.usefixtures("one_thread", "small_chunks")

CPU = torch.device("cpu")
NAMES = ["plain", "+ chunked log-probs", "+ shared prompts", "+ pruning", "checkpointed, prompts not shared"]
COMPILED = "+ torch.compile of norms and MLPs"


@pytest.fixture
def bench():
    return gpu.prepare(gpu.SCALES["cpu"], CPU)


@pytest.fixture
def compiled_by_nothing(monkeypatch):
    """torch.compile without its compiler, which takes a minute."""
    monkeypatch.setattr(variants, "BACKEND", "eager")


def named(name, on_gpu=False):
    return next(variant for variant in ladder(on_gpu) if variant.name == name)


def plain_step(bench):
    kept = GradientKeeper(bench.model)
    return bench.train(named("plain"), kept)[0].item(), kept.gradients


def reads_of(bench, variant):
    with reading(bench.model) as reads:
        bench.train(variant, GradientKeeper(bench.model))
    return reads


@pytest.mark.slow
def test_the_command_measures_every_variant(compiled_by_nothing, roots, capsys):
    assert cli.main(["bench", "gpu", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "groups: 4\ngroup size: 4" in printed and "predicted GiB" in printed and "not measured" not in printed
    report = Report.read(paths.RUNS / "bench" / "gpu.json")
    assert [row["variant"] for row in report.rows] == [*NAMES, COMPILED]
    assert (
        report.settings["dtype"] == "float32" and report.settings["device"] == "CPU" and report.settings["rounds"] == 3
    )
    state = 3 * report.settings["parameters"] * 4 / GIB
    for row in report.rows:
        assert row["gradient_difference"] < 1e-5 and row["loss_difference"] < 1e-6 and row["grad_norm"] > 0
        peak = row["GiB"] - state
        assert peak / 1.2 < row["predicted_GiB"] - state < peak * 1.2, row["variant"]
        assert row["utilisation"] > 0 and row["tokens_per_second"] > 0
    assert report.rows[0]["time_ratio"] == Spread(1.0, 1.0, 1.0) and report.rows[0]["gradient_difference"] == 0


def test_each_variant_leaves_out_what_it_says(bench):
    """Of 16 rows of 4 groups, 4 rows at a time: 12 in 3 groups have an advantage."""
    read = {name: reads_of(bench, named(name)) for name in NAMES}
    assert [(r.rows, r.past) for r in read["plain"]] == [(4, 0)] * 4 == [(r.rows, r.past) for r in read[NAMES[1]]]
    shared, pruned = read["+ shared prompts"], read["+ pruning"]
    assert [len(microbatches(read[name])) for name in NAMES] == [4, 4, 4, 3, 3]
    assert [r.rows for r in shared] == [1, 4] * 4 and [r.rows for r in pruned] == [1, 4] * 3
    assert all(later.past == prompt.width for prompt, later in zip(shared[::2], shared[1::2], strict=True))
    assert [r.rows for r in read[NAMES[4]]] == [4] * 3
    assert not bench.model.is_gradient_checkpointing  # taken off again
    responses = [len(response) for _, response in bench.rows.token_ids]
    assert named("plain").scored_tokens(bench.rows, read["plain"]) == sum(r.tokens for r in read["plain"])
    assert named("+ shared prompts").scored_tokens(bench.rows, shared) == sum(responses)
    assert named("+ pruning").scored_tokens(bench.rows, pruned) == sum(responses[:12])


def test_holding_all_logits_takes_more(bench):
    loss, gradients = plain_step(bench)
    plain, chunked = (gpu.check(bench, named(name), loss, gradients) for name in NAMES[:2])
    assert plain["GiB"] > chunked["GiB"] and plain["flops"] > chunked["flops"]
    assert plain["gradient_difference"] == plain["loss_difference"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("breakage", ["positions", "rewards", "loss"])
def test_a_variant_that_computes_something_else_is_refused(breakage, monkeypatch, compiled_by_nothing):
    if breakage == "positions":
        right = logprobs.response_states
        monkeypatch.setattr(logprobs, "response_states", lambda model, ids, mask: right(model, ids, mask).roll(1, 0))
        broken = {"+ shared prompts", "+ pruning", COMPILED}
    elif breakage == "rewards":
        step = variants.package_step

        def other(model, tokenizer, optimizer, rows, *rest):
            rewards = [reward + 0.01 * (i == 0) for i, reward in enumerate(rows.rewards)]
            return step(model, tokenizer, optimizer, replace(rows, rewards=rewards), *rest)

        monkeypatch.setattr(variants, "package_step", other)
        broken = {"+ pruning", "checkpointed, prompts not shared", COMPILED}
    else:
        right_too = logprobs.log_probs_and_entropy

        def shifted(*arguments):
            log_probs, entropy = right_too(*arguments)
            return log_probs + torch.linspace(0, 1, len(log_probs)), entropy

        for module in (logprobs, variants):
            monkeypatch.setattr(module, "log_probs_and_entropy", shifted)  # the gradient is as it was
        broken = {*NAMES[1:], COMPILED}
    report = gpu.bench_gpu("cpu", rounds=1)
    failed = {row["variant"]: row["not_measured"] for row in report.rows if "not_measured" in row}
    assert (
        set(failed) == broken and {row["variant"] for row in report.rows if "GiB" in row} == {*NAMES, COMPILED} - broken
    )
    assert all("ValueError: the gradient differs from the plain step's by" in why for why in failed.values())
    assert failed["+ pruning"] in str(report)


@pytest.mark.slow
def test_a_variant_that_breaks_off_has_no_speed(monkeypatch):
    def no_compiler(model):
        for module in model.modules():
            if type(module).__name__.endswith("MLP"):
                module.compile(backend=fail)

    def fail(*_):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(gpu, "compile_parts", no_compiler)
    report = gpu.bench_gpu("cpu", rounds=1)
    assert report.rows[-1]["variant"] == COMPILED and "no compiler" in report.rows[-1]["not_measured"]
    assert [row["variant"] for row in report.rows if "GiB" in row] == NAMES


def test_a_plain_step_without_a_number_is_an_error(compiled_by_nothing, monkeypatch, capsys):
    right = logprobs.log_probs_from_logits

    def broken(*arguments, **settings):
        return {name: values * torch.nan for name, values in right(*arguments, **settings).items()}

    monkeypatch.setattr(logprobs, "log_probs_from_logits", broken)
    assert cli.main(["bench", "gpu", "--device", "cpu"]) == 1
    assert "gpu: the plain step" in capsys.readouterr().err


def test_model_flops_are_those_of_the_products(bench):
    """torch counts them too; attention by hand, whose backward pass in one kernel computes the scores again."""
    bench.model.set_attn_implementation("eager")
    plain = replace(named("plain"), attention="eager")
    with FlopCounterMode(display=False) as counter:
        reads = reads_of(bench, plain)
    assert counter.get_total_flops() == training_flops(bench.architecture, reads, sum(r.tokens for r in reads))


def test_model_flops_by_hand():
    model = Architecture(0, hidden=2, layers=3, intermediate=5, key_values=1, vocabulary=7, context=9)
    # A layer's weights: queries 4, keys 2, values 2, output 4, MLP 30.  Attention: 8 tokens see 3 + 4, twice 2 numbers.
    assert training_flops(model, [Read(2, 4, 3)], 6) == 6 * (8 * 3 * 42 + 6 * 14 + 3 * 8 * 7 * 2 * 2)


def test_the_rate_of_products(monkeypatch):
    ticks = iter([0.0, 2.0, 2.0, 3.0, 3.0, 7.0, 7.0, 9.0, 9.0, 11.0])
    monkeypatch.setattr("rlhelpers.bench.gpu.time.perf_counter", lambda: next(ticks))
    assert matrix_rate(CPU, torch.float32, 8) == 20 * 2 * 8**3 / 1.0


def test_the_real_size_and_the_rows_that_fit():
    scale = gpu.SCALES["cuda"]
    assert scale.model == OLMO_1B
    model = Architecture.of(gpu.Olmo2Config(**scale.model))
    assert gpu.rows_that_fit(model, scale, 130 * GIB) == 8 == scale.group_size
    assert gpu.rows_that_fit(model, scale, 19 * GIB) == 2
    with pytest.raises(ValueError, match="device: it has too little memory"):
        gpu.rows_that_fit(model, scale, 14 * GIB)


def test_flash_attention_where_it_is_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "flash_attn" or None)
    assert [v.attention for v in ladder(on_gpu=False)] == ["sdpa"] * 6
    assert [v.attention for v in ladder(on_gpu=True)] == ["sdpa"] * 4 + ["flash_attention_2"] * 3


def test_a_device_that_is_not_here(capsys):
    assert cli.main(["bench", "gpu", "--device", "cuda:7"]) == 2
    assert "device: got 'cuda:7'" in capsys.readouterr().err
