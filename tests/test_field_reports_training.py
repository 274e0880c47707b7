"""What people met with other trainers' runs, logs and plots, one test for each report, under the report's number.

Where a report leaves a choice, its test pins ours.  Metrics of a run are one metrics.jsonl; a report's CSV is the table
that read_metrics makes of it.  field_reports.md says which reports have no test here or in
test_field_reports_mathematics.py, and why.
"""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from rlhelpers import paths
from rlhelpers.evidence.runs import read_metrics
from rlhelpers.kernels import grpo_train_step
from rlhelpers.kernels.logprobs import score_batch
from rlhelpers.kernels.tokens import pad_prompts_and_outputs
from rlhelpers.rollouts import Sampling, TorchEngine, torch_engine
from rlhelpers.tasks import Grader, Problem, get_prompt
from rlhelpers.training import own_step
from rlhelpers.training.config import make_config
from rlhelpers.training.draws import draw_batch
from rlhelpers.training.evaluation import evaluate, flatten, truncated_fraction
from rlhelpers.training.loop import train

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
        patch.setattr(own_step, "load_train_step", lambda *_: spy)
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


# --- sampling --------------------------------------------------------------------------------------------------------


def test_b19_every_end_of_text_id_ends_a_response(tiny_gpt2, tokenizer, monkeypatch):
    model = tiny_gpt2(torch.float32)
    model.generation_config.eos_token_id = [2, 9]
    steps = iter(torch.tensor([[4, 9, 3, 3], [4, 5, 6, 7]]).T)

    def scripted(logits, uniforms, sampling, barred=()):
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


def test_b27_sampling_that_leaves_tokens_out_is_said_where_there_are_ratios(run):
    """Policy: engines give the log-probs of the whole distribution, before top_p, so ratios stay finite and comparable;
    the run keeps a remark, since they are not those of the policy that acted.  There is no top_k."""
    folder, _ = run
    [remark] = [text for text in read_about(folder)["remarks"] if text.startswith("top_p=0.9")]
    assert "offpolicy_clip" in remark
    assert (read_metrics(folder)["mismatch_max"].dropna() < 1e-3).all()


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


# --- records ---------------------------------------------------------------------------------------------------------


def test_b54_a_run_logs_both_spreads_under_names_of_their_own(run):
    metrics = read_metrics(run[0]).loc[1:]
    assert metrics[["reward_std_batch", "reward_std_within_groups", "signal_fraction"]].notna().all(axis=None)


# --- none is forgotten -----------------------------------------------------------------------------------------------
