"""The data sets of reasoning-gym, each with its own verifier."""

from rlhelpers.tasks.datasets import Problem
from rlhelpers.tasks.grading import RIGHT, UNREADABLE, WRONG, Verifier

TRAIN_SEED, VALIDATION_SEED = 1, 2
# Not offered: their verifiers run the model's text as Python (`eval`, or sympy's `parse_expr`, which calls eval).
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
    """The answer of an entry as text, and the whole entry, which a verifier may need."""

    entry: dict


def load_gym(name: str, n_train: int, n_validation: int) -> tuple[list[Problem], list[Problem], Verifier]:
    """Make distinct training and validation problems of the data set `name`, always the same ones, and their verifier.

    An answer is right where reasoning-gym gives it the full score.  Raises ValueError for an unknown name, for a data
    set whose verifier would run the model's text as code, and where there are too few distinct questions.
    """
    import reasoning_gym  # here, because it brings a hundred generators

    check_gym(name)
    seen: set[str] = set()
    validation = _draw(reasoning_gym, name, VALIDATION_SEED, n_validation, "n_val_examples", seen)
    train = _draw(reasoning_gym, name, TRAIN_SEED, n_train, "n_train_examples", seen)
    scorer = reasoning_gym.create_dataset(name, size=1, seed=0)

    def verify(answer: str, truth: GymAnswer) -> str:
        if not isinstance(truth, GymAnswer):  # a table of texts, for instance, keeps no entries
            raise ValueError(f"ground_truth: got {truth!r}; accepted is the answer of a problem of gym/{name}")
        try:
            right = scorer.score_answer(answer.strip(), truth.entry) == 1
        except Exception:  # some raise on a text that is not of their form
            return UNREADABLE
        return RIGHT if right else WRONG

    return train, validation, verify


def check_gym(name: str) -> None:
    """Raise ValueError unless the data set `name` is offered here."""
    from reasoning_gym.factory import DATASETS

    accepted = sorted(set(DATASETS) - EVALUATING - {"composite"})  # composite needs a configuration of its own
    if name in EVALUATING:
        raise ValueError(f"task: got 'gym/{name}', whose verifier runs the model's text as code; it is not offered")
    if name not in accepted:
        raise ValueError(f"task: got 'gym/{name}'; accepted after gym/ are {', '.join(accepted)}")


def _draw(reasoning_gym, name: str, seed: int, count: int, field: str, seen: set[str]) -> list[Problem]:
    """Draw `count` problems whose questions are not in `seen`; add their questions to it."""
    problems: list[Problem] = []
    for entry in reasoning_gym.create_dataset(name, size=2 * count + 100, seed=seed):  # some questions come twice
        if len(problems) == count:
            return problems
        if entry["question"] not in seen:
            seen.add(entry["question"])
            answer = GymAnswer(entry["answer"])
            answer.entry = entry
            problems.append(Problem(entry["question"], answer))
    raise ValueError(f"{field}: got {count}; gym/{name} gave only {len(problems)} distinct questions")
