"""How well a policy does on problems it is not trained on."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rlhelpers.rollouts import Rollout, RolloutEngine, Sampling
from rlhelpers.tasks import Problem, Prompt, RewardFn


def evaluate(
    engine: RolloutEngine, problems: Sequence[Problem], prompt: Prompt, reward_fn: RewardFn, sampling: Sampling
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Sample and grade every problem.  Returns the metrics, named `val_...`, and one row for each response."""
    rollouts = engine.generate([prompt(problem.question) for problem in problems], sampling)
    grades = [
        reward_fn(completion.text, problem.answer)
        for problem, rollout in zip(problems, rollouts, strict=True)
        for completion in rollout.completions
    ]
    rows = rollout_rows(problems, rollouts, [g["reward"] for g in grades], [g["format_reward"] for g in grades])
    metrics = {
        "val_reward": fmean(row["reward"] for row in rows),
        "val_format_reward": fmean(row["format_reward"] for row in rows),
        "val_response_length": fmean(row["tokens"] for row in rows),
        "val_truncated_fraction": fmean(row["finish_reason"] == "length" for row in rows),
    }
    return metrics, rows


def rollout_rows(
    problems: Sequence[Problem], rollouts: Sequence[Rollout], rewards: Sequence[float], formats: Sequence[float]
) -> list[dict[str, Any]]:
    """Responses as rows for people: question, response, verdict; rewards are in the order of the completions."""
    completions = [
        (problem, completion)
        for problem, rollout in zip(problems, rollouts, strict=True)
        for completion in rollout.completions
    ]
    return [
        {
            "question": problem.question,
            "ground_truth": problem.answer,
            "response": completion.text,
            "finish_reason": completion.finish_reason,
            "tokens": len(completion.token_ids),
            "reward": float(reward),
            "format_reward": float(format_reward),
        }
        for (problem, completion), reward, format_reward in zip(completions, rewards, formats, strict=True)
    ]
