"""The data sets of reasoning-gym as tasks, each graded by its own verifier."""

from rlhelpers.tasks.grading import RIGHT, UNREADABLE, WRONG
from rlhelpers.tasks.task import Problem, Task

TRAIN_SEED, VALIDATION_SEED = 1, 2
# Their verifiers run the model's text as Python (`eval`, or sympy's `parse_expr`, which is eval in disguise).
EVALUATING = {
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}


class GymAnswer(str):
    """The printed answer of an entry, with the whole entry beside it: a verifier may need more than the answer."""

    entry: dict


def load_gym(name: str, n_train: int, n_validation: int) -> Task:
    """Make `n_train` + `n_validation` distinct problems of reasoning-gym's data set `name`, always the same ones.

    An answer counts as right where the verifier gives its full score.  Raises ValueError for an unknown name, for a
    data set whose verifier would run the model's text as code, and when there are too few distinct questions.
    """
    import reasoning_gym  # here, because it brings a hundred generators

    check_gym(name)
    seen: set[str] = set()
    validation = _draw(reasoning_gym, name, VALIDATION_SEED, n_validation, "n_val_examples", seen)
    train = _draw(reasoning_gym, name, TRAIN_SEED, n_train, "n_train_examples", seen)
    verifier = reasoning_gym.create_dataset(name, size=1, seed=0)

    def judge(answer: str, truth: GymAnswer) -> str:
        if not isinstance(truth, GymAnswer):  # a table of texts, for instance, keeps no entries
            raise ValueError(f"ground_truth: got {truth!r}; accepted is the answer of a problem of gym/{name}")
        try:
            right = verifier.score_answer(answer.strip(), truth.entry) == 1
        except Exception:  # some verifiers raise on text that is not of their form; it is not right, and no more
            return UNREADABLE
        return RIGHT if right else WRONG

    return Task(f"gym/{name}", train, validation, judge)


def check_gym(name: str) -> None:
    """Raise ValueError unless it is the name of a data set that is offered here."""
    from reasoning_gym.factory import DATASETS

    accepted = sorted(set(DATASETS) - EVALUATING - {"composite"})  # composite needs a configuration of its own
    if name in EVALUATING:
        raise ValueError(f"task: got 'gym/{name}', whose verifier runs the model's text as code; it is not offered")
    if name not in accepted:
        raise ValueError(f"task: got 'gym/{name}'; accepted after gym/ are {', '.join(accepted)}")


def _draw(reasoning_gym, name: str, seed: int, count: int, field: str, seen: set[str]) -> list[Problem]:
    """`count` problems whose questions are not in `seen`, which grows by them."""
    problems: list[Problem] = []
    # Some questions turn up twice, so more are made than needed.
    for entry in reasoning_gym.create_dataset(name, size=2 * count + 100, seed=seed):
        if len(problems) == count:
            return problems
        if entry["question"] not in seen:
            seen.add(entry["question"])
            answer = GymAnswer(entry["answer"])
            answer.entry = entry
            problems.append(Problem(entry["question"], answer))
    raise ValueError(f"{field}: got {count}; gym/{name} gave only {len(problems)} distinct questions")
