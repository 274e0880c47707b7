"""The benchmark for GPUs at a size that the CPU can do: that variants do what they say, and what is refused."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rlhelpers import cli, paths
from rlhelpers.bench import gpu, training_tables, variants
from rlhelpers.bench.flops import Read, matrix_rate, microbatches, reading, training_flops
from rlhelpers.bench.made_up import make_batch
from rlhelpers.bench.variants import GradientKeeper, almost_mean, ladder
from rlhelpers.doctor.machine import OLMO_1B
from rlhelpers.doctor.memory import GIB, Architecture
from rlhelpers.kernels import logprobs

pytestmark = pytest.mark.usefixtures("one_thread", "small_chunks")

CPU = torch.device("cpu")
NAMES = ["plain", "+ chunked log-probs", "+ shared prompts", "+ pruning", "checkpointed, prompts not shared"]
COMPILED = "+ torch.compile of norms and MLPs"


@pytest.fixture
def bench():
    return gpu.prepare(gpu.SCALES["small"], CPU)


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


def test_the_command_measures_every_variant(compiled_by_nothing, roots, capsys):
    assert cli.main(["bench", "gpu", "--device", "cpu", "--size", "small"]) == 0
    printed = capsys.readouterr().out
    assert "0.0e+00" in printed and "4 groups of 4 responses" in printed and "predicted" in printed
    report = json.loads((paths.RUNS / "bench" / "gpu.json").read_text(encoding="utf-8"))
    assert list(report["variants"]) == [*NAMES, COMPILED] and report["failed"] == {}
    assert report["dtype"] == "float32" and report["conditions"]["device"] == "CPU" and report["rounds"] == 3
    for name, row in report["variants"].items():
        assert row["difference"] < 1e-5 and row["loss_difference"] < 1e-6 and row["grad_norm"] > 0
        assert row["peak_bytes"] / 1.2 < row["predicted_bytes"] < row["peak_bytes"] * 1.2, name
        assert row["utilisation"] > 0 and row["tokens_per_second"] > 0
    ratio = report["variants"]["plain"]["ratio"]
    assert ratio == {"median": 1.0, "low": 1.0, "high": 1.0}


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
    responses = [len(response) for _, response in bench.batch.token_ids]
    assert named("plain").scored_tokens(bench.batch, read["plain"]) == sum(r.tokens for r in read["plain"])
    assert named("+ shared prompts").scored_tokens(bench.batch, shared) == sum(responses)
    assert named("+ pruning").scored_tokens(bench.batch, pruned) == sum(responses[:12])


def test_holding_all_logits_takes_more(bench):
    loss, gradients = plain_step(bench)
    plain, chunked = (gpu.check(bench, named(name), loss, gradients) for name in NAMES[:2])
    assert plain.peak_bytes > chunked.peak_bytes and plain.flops > chunked.flops
    assert plain.difference == plain.loss_difference == 0


@pytest.mark.parametrize("breakage", ["positions", "baseline", "loss"])
def test_a_variant_that_computes_something_else_is_refused(breakage, monkeypatch, compiled_by_nothing):
    if breakage == "positions":
        right = logprobs.response_states
        monkeypatch.setattr(logprobs, "response_states", lambda model, ids, mask: right(model, ids, mask).roll(1, 0))
        broken = {"+ shared prompts", "+ pruning", COMPILED}
    elif breakage == "baseline":
        monkeypatch.setattr(variants, "almost_mean", lambda rewards: almost_mean(rewards) + 0.01)
        broken = {"+ pruning", "checkpointed, prompts not shared", COMPILED}
    else:
        right_too = logprobs.log_probs_and_entropy

        def shifted(*arguments):
            log_probs, entropy = right_too(*arguments)
            return log_probs + torch.linspace(0, 1, len(log_probs)), entropy

        monkeypatch.setattr(logprobs, "log_probs_and_entropy", shifted)  # the gradient is as it was
        broken = {*NAMES[1:], COMPILED}
    report = gpu.bench_gpu("cpu", rounds=1)
    assert set(report["failed"]) == broken and not broken & set(report["variants"])
    assert all("ValueError: the gradient differs from the plain step's by" in why for why in report["failed"].values())
    assert "+ pruning: not measured, ValueError: the gradient differs" in training_tables.gpu_text(report)


def test_a_variant_that_breaks_off_has_no_speed(monkeypatch):
    def no_compiler(model):
        for module in model.modules():
            if type(module).__name__.endswith("MLP"):
                module.compile(backend=fail)

    def fail(*_):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(gpu, "compile_parts", no_compiler)
    report = gpu.bench_gpu("cpu", rounds=1)
    assert list(report["failed"]) == [COMPILED] and "no compiler" in training_tables.gpu_text(report)
    assert list(report["variants"]) == NAMES


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
    plain = variants.replace(named("plain"), attention="eager")
    with FlopCounterMode(display=False) as counter:
        reads = reads_of(bench, plain)
    assert counter.get_total_flops() == training_flops(bench.architecture, reads, sum(r.tokens for r in reads))


def test_model_flops_by_hand():
    model = Architecture(0, hidden=2, layers=3, intermediate=5, key_values=1, vocabulary=7, context=9)
    # A layer's weights: queries 4, keys 2, values 2, output 4, MLP 30.  Attention: 8 tokens see 3 + 4, twice 2 numbers.
    assert training_flops(model, [Read(2, 4, 3)], 6) == 6 * (8 * 3 * 42 + 6 * 14 + 3 * 8 * 7 * 2 * 2)


def test_the_rate_of_products(monkeypatch):
    ticks = iter([0.0, 2.0, 2.0, 3.0, 3.0, 7.0, 7.0, 9.0, 9.0, 11.0])
    monkeypatch.setattr("rlhelpers.bench.flops.time.perf_counter", lambda: next(ticks))
    assert matrix_rate(CPU, torch.float32, 8) == 20 * 2 * 8**3 / 1.0


def test_the_real_size_and_the_rows_that_fit():
    scale = gpu.SCALES["1b"]
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


def test_made_up_batches():
    batch = make_batch(50, 3, 2, (4, 6), (1, 3), without_signal=1)
    assert batch == make_batch(50, 3, 2, (4, 6), (1, 3), without_signal=1)
    assert batch.rewards == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert [batch.has_signal(i) for i in range(6)] == [True] * 4 + [False] * 2
    assert all(4 <= len(p) <= 6 and 1 <= len(r) <= 3 for p, r in batch.token_ids)
    assert batch.token_ids[0][0] is batch.token_ids[1][0] and batch.token_ids[1][0] != batch.token_ids[2][0]


def test_a_device_that_is_not_here(capsys):
    assert cli.main(["bench", "gpu", "--device", "cuda:7"]) == 2
    assert "device: got 'cuda:7'" in capsys.readouterr().err
