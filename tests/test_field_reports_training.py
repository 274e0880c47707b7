"""What people met with other trainers' runs, logs and plots, one test for each report, under the report's number.

Where a report leaves a choice, its test pins ours.  Metrics of a run are one metrics.jsonl; a report's CSV is the table
that read_metrics makes of it.  field_reports.md says which reports have no test here or in
test_field_reports_mathematics.py, and why.
"""

import json
import math
import os
import re
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from rlhelpers import paths
from rlhelpers.evidence.figures import learning_curves
from rlhelpers.evidence.runs import read_metrics
from rlhelpers.kernels import grpo_train_step
from rlhelpers.kernels.estimators import Estimator
from rlhelpers.kernels.logprobs import score_batch
from rlhelpers.kernels.tokens import pad_prompts_and_outputs
from rlhelpers.models import make_optimizer
from rlhelpers.rollouts import Sampling, TorchEngine, torch_engine
from rlhelpers.tasks import Grader, Problem, get_prompt
from rlhelpers.training import checkpoint
from rlhelpers.training import own_step as components
from rlhelpers.training.checkpoint import Checkpoint, newest
from rlhelpers.training.config import make_config
from rlhelpers.training.draws import draw_batch
from rlhelpers.training.evaluation import evaluate, flatten, truncated_fraction
from rlhelpers.training.loop import train
from rlhelpers.training.preflight import cautions, unmoved_share
from rlhelpers.training.run_folder import RunRecords

pytestmark = pytest.mark.usefixtures("one_thread")

REPORTS = Path(__file__).parents[2] / "shared/cases/field_reports.jsonl"
HERE = Path(__file__).parent

SMALL = {
    "quick": True,
    "device": "cpu",
    "n_train_examples": 10,
    "n_val_examples": 4,
    "group_size": 4,
    "rollout_batch_size": 16,
    "train_batch_size": 16,
    "max_tokens": 16,
    "num_rollout_steps": 3,
    "top_p": 0.9,
    "estimator": "offpolicy_clip",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps, four prompts each, of ten problems: its folder, and what every call of its step was given
    as prompts, responses and ground truths."""
    given = []

    def spy(*arguments, **settings):
        given.append(arguments[6:9])
        return grpo_train_step(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        patch.setattr(components, "load_train_step", lambda *_: spy)
        return train(make_config(**SMALL)), given


def read_about(folder):
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


# --- batches ---------------------------------------------------------------------------------------------------------


def test_b11_a_group_is_of_one_prompt(run, tiny_gpt2, tokenizer):
    """Prompts are repeated, not tiled: a reward that only depends on the prompt gives no advantage."""
    problems = [Problem("a b", "1.0"), Problem("c", "0.0")]
    rollouts = TorchEngine(tiny_gpt2(), tokenizer).generate(["a b", "c"], Sampling(n=2, max_tokens=4))
    samples = flatten(problems, rollouts)
    prompts = [rollout.prompt for _, rollout, _ in samples]
    truths = [problem.answer for problem, _, _ in samples]
    assert prompts == ["a b", "a b", "c", "c"] and truths == ["1.0", "1.0", "0.0", "0.0"]
    model = tiny_gpt2()
    _, metadata = grpo_train_step(
        model,
        tokenizer,
        torch.optim.SGD(model.parameters()),
        1,
        None,
        lambda _, truth: {"reward": float(truth), "format_reward": 1},
        prompts,
        [completion.text for _, _, completion in samples],
        truths,
        2,
    )
    assert metadata["pruned_fraction"] == 1.0 and metadata["rewards"].tolist() == [1.0, 1.0, 0.0, 0.0]
    for prompts, responses, truths in run[1]:  # as the loop gives them
        assert len(prompts) == len(responses) == len(truths) == 16
        for start in range(0, 16, 4):
            assert len(set(prompts[start : start + 4])) == len(set(truths[start : start + 4])) == 1


def test_b13_ten_problems_in_batches_of_four_go_round(run):
    """Policy: an endless stream in which every epoch is a new shuffle, no batch short, none dropped."""
    problems = [Problem(f"{i}", f"{i}") for i in range(10)]
    batches = [draw_batch(problems, batch, 4, seed=0) for batch in range(5)]
    assert {len(batch) for batch in batches} == {4}
    assert Counter(problem.answer for batch in batches for problem in batch) == {f"{i}": 2 for i in range(10)}
    assert read_about(run[0])["status"] == "complete" and len(run[1]) == 3  # three batches of four, of ten


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_batch_size": 17}, "train_batch_size: got 17; it must be a multiple of group_size=8"),
        ({"n_train_examples": 3, "rollout_batch_size": 32, "train_batch_size": 32}, "got 3; it must be at least .* 4"),
    ],
)
def test_b13_batches_that_make_no_whole_groups_are_no_configuration(settings, message):
    with pytest.raises(ValueError, match=message):
        make_config(**settings)


# --- sampling --------------------------------------------------------------------------------------------------------


def test_b19_every_end_of_text_id_ends_a_response(tiny_gpt2, tokenizer, monkeypatch):
    model = tiny_gpt2(torch.float32)
    model.generation_config.eos_token_id = [2, 9]
    steps = iter(torch.tensor([[4, 9, 3, 3], [4, 5, 6, 7]]).T)

    def scripted(logits, luck, sampling, barred=()):
        tokens = next(steps)[-len(logits) :]  # the first row leaves first
        return tokens, torch.zeros(len(tokens))

    monkeypatch.setattr(torch_engine, "draw_tokens", scripted)
    (rollout,) = TorchEngine(model, tokenizer).generate(["a"], Sampling(n=2, max_tokens=4))
    assert [c.token_ids for c in rollout.completions] == [[4, 9], [4, 5, 6, 7]]
    assert [c.finish_reason for c in rollout.completions] == ["stop", "length"]
    assert truncated_fraction(flatten([Problem("", "")], [rollout])) == 0.5
    outputs = [c.token_ids for c in rollout.completions]
    batch = pad_prompts_and_outputs([[3], [3]], outputs, tokenizer.pad_token_id)
    assert batch["response_mask"].int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("grouped", [True, False])
def test_b23_short_prompts_are_read_at_their_own_positions(grouped, tiny_gpt2, tokenizer, monkeypatch):
    """Both caches of the engine, the one that shares prompts and the plain one, which pads on the left."""
    if not grouped:
        monkeypatch.setattr(torch_engine, "can_group", lambda _: False)
    model, prompts = tiny_gpt2(torch.float32), ["a b c d e f g", "h"]
    model.generation_config.eos_token_id = None
    rollouts = TorchEngine(model, tokenizer).generate(prompts, Sampling(temperature=0, max_tokens=8))
    for rollout in rollouts:
        prompt, (completion,) = torch.tensor([rollout.prompt_token_ids]), rollout.completions
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8)
        length = len(completion.token_ids)
        assert completion.token_ids == alone[0, prompt.shape[1] :].tolist()[:length] and length > 0
        row = pad_prompts_and_outputs([rollout.prompt_token_ids], [completion.token_ids], 0)
        scores = score_batch(model, row["input_ids"], row["labels"], 1)[row["response_mask"]]
        assert scores.tolist() == pytest.approx(completion.log_probs, abs=1e-5)


def test_b26_greedy_samples_have_log_probs_and_are_nothing_to_train_on(tiny_gpt2, tokenizer):
    model, greedy = tiny_gpt2(torch.float32), Sampling(n=2, temperature=0, max_tokens=6)
    engine = TorchEngine(model, tokenizer)
    metrics, rows = evaluate(engine, [Problem("a b", "1")], Grader(get_prompt("question_only")), greedy)
    assert len({row["response"] for row in rows}) == 1 and math.isfinite(metrics["val_reward"])
    (rollout,) = engine.generate(["a b"], greedy)
    assert all(math.isfinite(value) for completion in rollout.completions for value in completion.log_probs)
    ids = torch.tensor([[3, 4]])
    with pytest.raises(ValueError, match="temperature: got 0"):
        score_batch(model, ids, ids, 1, temperature=0)
    for temperature in (0, -1):
        with pytest.raises(ValueError, match=f"temperature: got {temperature}"):
            make_config(temperature=temperature)


def test_b27_sampling_that_leaves_tokens_out_is_said_where_there_are_ratios(run, tiny_gpt2):
    """Policy: engines give the log-probs of the whole distribution, before top_p, so ratios stay finite and comparable;
    the run keeps a remark, since they are not those of the policy that acted.  There is no top_k."""
    folder, _ = run
    [remark] = [text for text in read_about(folder)["remarks"] if text.startswith("top_p=0.9")]
    assert "offpolicy_clip" in remark
    assert (read_metrics(folder)["mismatch_max"].dropna() < 1e-3).all()
    policy = tiny_gpt2(torch.float32)
    capped = Estimator("capped", engine_ratio_cap=2.0)
    assert make_config().top_p == 1 and not list(cautions(make_config(estimator="cispo"), policy))
    assert not list(cautions(make_config(top_p=0.9), policy))  # no ratios
    for settings in ({"top_p": 0.9, "estimator": capped}, {"min_tokens": 2, "estimator": "gspo"}):
        [text] = cautions(make_config(**settings), policy)
        assert text.startswith(next(f"{name}={settings[name]} " for name in settings))
    with pytest.raises(ValueError, match="top_k: there is no such setting"):
        make_config(top_k=20)


def test_b53_checkpointing_and_dropout_of_training_do_not_reach_sampling(tiny_gpt2, tokenizer):
    model = tiny_gpt2(torch.float32, dropout=0.1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer, rewards = torch.optim.SGD(model.parameters(), lr=0.1), {"d e": 1, "f": 0}

    def grade(response, _):
        return {"reward": rewards[response], "format_reward": 1}

    _, metadata = grpo_train_step(model, tokenizer, optimizer, 1, 1.0, grade, ["a"] * 2, [*rewards], ["", ""], 2)
    assert metadata["grad_norm"] > 0
    fresh = tiny_gpt2(torch.float32)
    fresh.load_state_dict(model.state_dict())
    greedy = Sampling(temperature=0, max_tokens=12)
    prompts, problems = ["a b", "c d e", "f"], [Problem("a b", "1")]
    trained, loaded = TorchEngine(model, tokenizer), TorchEngine(fresh, tokenizer)
    assert trained.generate(prompts, greedy) == loaded.generate(prompts, greedy)
    grader = Grader(get_prompt("question_only"))
    assert evaluate(trained, problems, grader, greedy) == evaluate(loaded, problems, grader, greedy)
    assert all(module.training for module in model.modules()) and model.is_gradient_checkpointing


# --- settings and weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, math.nan, True])
def test_b38_what_is_no_limit_of_a_norm_is_no_setting(value):
    """Policy: numbers may arrive as text, as papermill's -r and -y pass them, so "1.0" is one here; None is the
    preset's."""
    with pytest.raises(ValueError, match=f"max_grad_norm: got {value}"):
        make_config(max_grad_norm=value)
    assert make_config(max_grad_norm="1.0").max_grad_norm == make_config(max_grad_norm=None).max_grad_norm == 1.0
    assert make_config(max_grad_norm=math.inf).max_grad_norm == make_config(max_grad_norm="inf").max_grad_norm


@pytest.mark.parametrize("name", ["seed", "learning_rate", "temperature", "group_size", "num_rollout_steps", "top_p"])
def test_b38_true_is_no_number_of_any_setting(name):
    with pytest.raises(ValueError, match=f"{name}: got True; accepted is a number"):
        make_config(**{name: True})
    with pytest.raises(ValueError, match=r"betas.*: got .*False.*; accepted is a number"):
        make_config(betas=(False, 0.9))
    assert make_config(gradient_checkpointing=True, resume="true").resume


class Layer(torch.nn.Linear):
    device = torch.device("cpu")

    def __init__(self, weights, dtype):
        super().__init__(len(weights), 1, bias=False, dtype=dtype)
        self.dtype = dtype
        self.weight.data.copy_(torch.tensor([weights]))


@pytest.mark.parametrize(("dtype", "moved"), [(torch.float32, True), (torch.bfloat16, False)])
def test_b39_weights_that_swallow_updates_are_said_before_the_first_step(dtype, moved):
    """Policy: bfloat16 on CUDA as the course has it, without float32 copies; a run that begins says what share of the
    weights an update of the learning rate's size does not move."""
    config = make_config(learning_rate=1e-5)
    layer = Layer([1.0, 1e-3], dtype)
    before, share = layer.weight.detach().clone(), unmoved_share(layer, config.learning_rate)
    optimizer = make_optimizer(layer, config)
    for _ in range(100):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    assert layer.weight[0, 0].item() == pytest.approx(0.9990 if moved else 1.0, abs=1e-5)
    changed = (layer.weight != before).float().mean().item()
    assert changed == 1 - share == (1.0 if moved else 0.5)
    texts = list(cautions(config, layer))
    assert not texts if moved else texts[0].startswith("50% of the weights are too large for their precision")


# --- records ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")


def take(step, fingerprint, policy, optimizer):
    carried = {"tally": {}, "restarts": 0, "remarks": []}
    return Checkpoint.take(step, fingerprint, carried, policy, optimizer, None)


@pytest.fixture
def moving(tiny_gpt2):
    policy = tiny_gpt2(torch.float32)
    return policy, torch.optim.AdamW(policy.parameters())


def test_b44_a_resumed_run_has_every_step_once(runs, moving):
    config = make_config(quick=True, num_rollout_steps=10, checkpoint_every=5)
    with pytest.raises(RuntimeError, match="crash"), RunRecords(config) as records:
        for step in range(8):
            records.log({"step": step, "reward": 0.1})
            if step == 5:
                records.keep(take(step, records.fingerprint, *moving))
        raise RuntimeError("crash")
    with RunRecords(config.model_copy(update={"resume": True})) as records:
        for step in range(records.step + 1, 11):
            records.log({"step": step, "reward": 0.2, "new": 1.0})
    metrics = read_metrics(records.folder)
    assert list(metrics.index) == list(range(11))
    assert metrics["reward"].tolist() == [0.1] * 6 + [0.2] * 5
    assert metrics["new"].isna().tolist() == [True] * 6 + [False] * 5
    assert [line.split(",")[0] for line in metrics.to_csv().splitlines()] == ["step", *map(str, range(11))]
    (line,) = learning_curves(metrics, "title").axes[0].lines
    assert (np.diff(line.get_xdata()) > 0).all()
    plt.close("all")


@pytest.mark.parametrize("steps", [[0, 1, 1], [0, 2, 1], [0, 1, None]])
def test_b44_a_step_that_stands_twice_is_an_error_that_names_it(tmp_path, steps):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps), encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: step (1|nan)"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("damage", ["half the weights", "no optimizer", "no name"])
def test_b45_a_checkpoint_that_is_not_whole_is_not_used(damage, tmp_path, moving):
    for step in (9, 10, 20):
        take(step, "f", *moving).save(tmp_path)
    take(9, "f", *moving).save(tmp_path / "nine")
    (tmp_path / "nine" / "step_00009").rename(tmp_path / "step_9")  # "step_9" > "step_00010" as text
    last, said = tmp_path / "step_00020", []
    if damage == "half the weights":
        os.truncate(last / checkpoint.WEIGHTS, (last / checkpoint.WEIGHTS).stat().st_size // 2)
    elif damage == "no optimizer":
        (last / checkpoint.STATE).unlink()
    else:
        last.rename(tmp_path / "step_00020.123.tmp")
    assert newest(tmp_path, "f", said.append).step == 10
    assert len(said) == (damage != "no name") and all("step_00020 is not used" in text for text in said)


def test_b45_a_checkpoint_has_its_name_when_it_is_whole(tmp_path, moving, monkeypatch):
    names = []

    def save(state, file):
        names.append(file.parent.name)
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match="disk full"):
        take(10, "f", *moving).save(tmp_path)
    assert len(names) == 1 and names[0].endswith(".tmp") and not list(tmp_path.iterdir())


def test_b49_every_line_is_json_for_every_parser(runs):
    """Policy: what is not finite is null."""
    row = {"kl": math.nan, "ratio_max": math.inf, "loss": torch.tensor(1.5), "n": np.int64(3), "text": "é"}
    row |= {"half": torch.tensor(0.5, dtype=torch.bfloat16), "some": [torch.tensor([1.0, math.nan]), -math.inf]}
    with RunRecords(make_config(quick=True)) as records:
        records.log({"step": 0} | row)
        records.write_rollouts(0, "train", [row])
    files = [records.folder / "metrics.jsonl", records.folder / "rollouts" / "step_00000_train.jsonl"]
    lines = [json.loads(file.read_text(encoding="utf-8"), parse_constant=pytest.fail) for file in files]
    wanted = {"kl": None, "ratio_max": None, "loss": 1.5, "n": 3, "text": "é", "half": 0.5, "some": [[1.0, None], None]}
    assert lines == [{"step": 0} | wanted, wanted]
    assert type(lines[0]["n"]) is int


def test_b54_a_run_logs_both_spreads_under_names_of_their_own(run):
    metrics = read_metrics(run[0]).loc[1:]
    assert metrics[["reward_std_batch", "reward_std_within_groups", "signal_fraction"]].notna().all(axis=None)


# --- none is forgotten -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not REPORTS.exists(), reason="the reports are not at hand")
def test_every_report_on_training_has_its_test():
    with REPORTS.open(encoding="utf-8") as lines:
        reported = {report["id"] for report in map(json.loads, lines) if report["group"] == "B"}
    files = [HERE / f"test_field_reports_{topic}.py" for topic in ("mathematics", "training", "supplement")]
    tested = {
        name.upper() for file in files for name in re.findall(r"^def test_(b\d+)_", file.read_text("utf-8"), re.M)
    }
    marked = [re.findall(r'field_report\("(B\d+)"\)', file.read_text("utf-8")) for file in HERE.glob("test_*.py")]
    assert tested.union(*marked) == reported
