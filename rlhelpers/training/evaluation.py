"""How well a policy does on problems it is not trained on."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rlhelpers.kernels import compute_rollout_rewards
from rlhelpers.rollouts import Completion, Rollout, RolloutEngine, Sampling
from rlhelpers.tasks import Problem, Prompt, RewardFn

Sample = tuple[Problem, Rollout, Completion]


def evaluate(
    engine: RolloutEngine, problems: Sequence[Problem], prompt: Prompt, reward_fn: RewardFn, sampling: Sampling
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Sample and grade every problem.  Returns the metrics, named `val_...`, and one row for each response."""
    samples = flatten(problems, engine.generate([prompt(problem.question) for problem in problems], sampling))
    rewards, grades = compute_rollout_rewards(
        reward_fn,
        [completion.text for _, _, completion in samples],
        [problem.answer for problem, _, _ in samples],
    )
    metrics = {
        "val_reward": grades["mean_reward"],
        "val_format_reward": grades["mean_format_reward"],
        "val_response_length": fmean(len(completion.token_ids) for _, _, completion in samples),
        "val_truncated_fraction": truncated_fraction(samples),
    }
    return metrics, rows_to_read(samples, rewards.tolist(), grades["format_rewards"].tolist())


def flatten(problems: Sequence[Problem], rollouts: Sequence[Rollout]) -> list[Sample]:
    """One (problem, rollout, completion) for each response, a group's side by side."""
    pairs = zip(problems, rollouts, strict=True)
    return [(problem, rollout, completion) for problem, rollout in pairs for completion in rollout.completions]


def truncated_fraction(samples: Sequence[Sample]) -> float:
    return fmean(completion.finish_reason == "length" for _, _, completion in samples)


def rows_to_read(samples: Sequence[Sample], rewards: Sequence[float], formats: Sequence[float]) -> list[dict[str, Any]]:
    """Responses as rows for people: question, ground truth, response, verdict."""
    return [
        {
            "question": problem.question,
            "ground_truth": problem.answer,
            "response": completion.text,
            "finish_reason": completion.finish_reason,
            "tokens": len(completion.token_ids),
            "reward": reward,
            "format_reward": format_reward,
        }
        for (problem, _, completion), reward, format_reward in zip(samples, rewards, formats, strict=True)
    ]
