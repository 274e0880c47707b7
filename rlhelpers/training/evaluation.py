"""From rollouts to graded responses, and how well a policy does on problems that it is not trained on."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rlhelpers.checks import check_has, check_kind, check_list, refused
from rlhelpers.kernels.advantages import grade_one
from rlhelpers.rollouts import Completion, Rollout, RolloutEngine, Sampling
from rlhelpers.tasks import Grader, Problem
from rlhelpers.tasks.grading import REASONS, Grade

Sample = tuple[Problem, Rollout, Completion]


def evaluate(
    engine: RolloutEngine, problems: Sequence[Problem], grader: Grader, sampling: Sampling
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Sample and grade every problem.  Return the metrics, named `val_...`, and one row for each response.

    Raises ValueError where there is no problem, or an argument is of another kind."""
    check_list(problems=problems)
    if not len(problems) or not all(isinstance(problem, Problem) for problem in problems):
        raise refused("problems", problems, "a list of at least one Problem")
    check_kind(Grader, "a Grader", grader=grader)
    check_kind(Sampling, "a Sampling", sampling=sampling)
    check_has("generate", "a RolloutEngine", engine=engine)
    prompts = [grader.prompt(problem.question) for problem in problems]
    samples = flatten(problems, engine.generate(prompts, sampling))
    rows = rows_to_read(samples, grade_all(grader, samples))
    metrics = {
        "val_reward": fmean(row["reward"] for row in rows),
        "val_format_reward": fmean(row["format_reward"] for row in rows),
        "val_response_length": fmean(len(completion.token_ids) for _, _, completion in samples),
        "val_truncated_fraction": truncated_fraction(samples),
    }
    return metrics | reason_counts(rows, "val_"), rows


def flatten(problems: Sequence[Problem], rollouts: Sequence[Rollout]) -> list[Sample]:
    """One (problem, rollout, completion) for each response, a group's side by side."""
    pairs = zip(problems, rollouts, strict=True)
    return [(problem, rollout, completion) for problem, rollout in pairs for completion in rollout.completions]


def grade_all(grader: Grader, samples: Sequence[Sample]) -> list[Grade]:
    """The grade of each response.  Raises ValueError naming the response that the grader fails on."""
    pairs = ((completion.text, problem.answer) for problem, _, completion in samples)
    return [grade_one(grader.grade, i, *pair) for i, pair in enumerate(pairs)]


def truncated_fraction(samples: Sequence[Sample]) -> float:
    return fmean(completion.finish_reason == "length" for _, _, completion in samples)


def rows_to_read(samples: Iterable[Sample], grades: Iterable[Grade]) -> list[dict[str, Any]]:
    """Responses as rows for people: question, ground truth, response, verdict and why."""
    return [
        {
            "question": problem.question,
            "ground_truth": problem.answer,
            "response": completion.text,
            "finish_reason": completion.finish_reason,
            "tokens": len(completion.token_ids),
            "reward": grade.rewards["reward"],
            "format_reward": grade.rewards["format_reward"],
            "reason": grade.reason,
            "boxes_agree": grade.boxes_agree,
        }
        for (problem, _, completion), grade in zip(samples, grades, strict=True)
    ]


def reason_counts(rows: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, int]:
    """How many responses have each reason (`reason/no </think>`), reasons of no response left out; and
    `boxes_disagree`, how many responses hold several answers that are not the same."""
    counts = Counter(row["reason"] for row in rows)
    of_reasons = {f"{prefix}reason/{reason}": counts[reason] for reason in REASONS if counts[reason]}
    return of_reasons | {f"{prefix}boxes_disagree": sum(not row["boxes_agree"] for row in rows)}
