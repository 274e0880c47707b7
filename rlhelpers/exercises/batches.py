"""Exercises of notebooks 04 and 06: what becomes of a batch of rollouts between sampling and the train step."""

from collections.abc import Callable

from rlhelpers.exercises.exercise import Exercise
from rlhelpers.rollouts import Completion, Rollout
from rlhelpers.tasks import Problem
from rlhelpers.training.evaluation import flatten

# ---- 04: rows for the train step


def _groups(*sizes: int) -> dict:
    """A problem for each size of a group."""
    questions = [Problem(f"{i}+{i}=", str(2 * i)) for i in range(1, len(sizes) + 1)]
    rollouts = [
        Rollout(f"User: {p.question}", [i], [Completion(f"{p.question}{j}", [j], "stop", [-1.0]) for j in range(G)])
        for i, (p, G) in enumerate(zip(questions, sizes, strict=True))
    ]
    return {"problems": questions, "rollouts": rollouts}


def _rows(problems, rollouts):
    samples = flatten(problems, rollouts)
    prompts, responses = [r.prompt for _, r, _ in samples], [c.text for _, _, c in samples]
    return prompts, responses, [p.answer for p, _, _ in samples]


def _tiled(problems, rollouts):
    prompts, responses, _ = _rows(problems, rollouts)
    return prompts, responses, [p.answer for p in problems] * len(rollouts[0].completions)


rollout_rows = Exercise(
    "rollout_rows",
    _rows,
    {
        "a row for each response of a group": [_groups(2), _groups(4)],
        "a response is graded against the answer to its own prompt": [_groups(2, 2), _groups(4, 4, 4)],
    },
    {"ground truths tiled, where they must be repeated one by one": _tiled},
    lambda function, inputs: [list(column) for column in function(**inputs)],
)

# ---- 06: several updates on one rollout batch


class CountedPolicy:
    """A policy that counts its updates, and keeps what it was told of the old policy."""

    def __init__(self):
        self.updates, self.seen = 0, []

    def score(self, batch: str) -> str:
        return f"log-probs of {batch} after {self.updates} updates"

    def update(self, batch: str, old_log_probs: str) -> str:
        self.seen.append((batch, old_log_probs))
        self.updates += 1
        return f"metrics of update {self.updates}"


def _batches(*sizes: int) -> list[dict]:
    return [{"batches": [f"batch {i}" for i in range(n)]} for n in sizes]


def _what_was_seen(function: Callable, inputs: dict) -> dict:
    policy = CountedPolicy()
    returned = function(score=policy.score, update=policy.update, **inputs)
    return {"seen by the updates": policy.seen, "returned": returned}


def _scored_first(batches, score, update):
    old_log_probs = [score(batch) for batch in batches]
    return [update(batch, old) for batch, old in zip(batches, old_log_probs, strict=True)]


off_policy_updates = Exercise(
    "off_policy_updates",
    _scored_first,
    {
        "one batch: an update with its old log-probs": _batches(1),
        "several: in order, each with the log-probs of the policy that sampled": _batches(2, 3),
    },
    {
        "scoring a batch just before its update, so that every ratio is 1": lambda batches, score, update: [
            update(batch, score(batch)) for batch in batches
        ],
    },
    _what_was_seen,
)
