"""Any data set of reasoning-gym as a task, graded by the data set's own verifier."""

from rlhelpers.tasks.grading import ANSWER_FINDERS, make_reward_fn
from rlhelpers.tasks.problem import Problem, RewardFn, Task

TRAIN_SEED, VALIDATION_SEED = 1, 2


class GymAnswer(str):
    """The printed answer of an entry, with the whole entry beside it: a verifier may need more than the answer."""

    entry: dict


def load_gym(name: str, n_train: int, n_validation: int) -> Task:
    """Make `n_train` + `n_validation` problems of reasoning-gym's data set `name`, always the same ones.

    No validation question is among the training questions.  Raises ValueError for an unknown name, or when the data
    set has too few distinct questions.
    """
    import reasoning_gym  # here, because it brings a hundred generators
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(f"task: got 'gym/{name}'; accepted after gym/ are {', '.join(sorted(DATASETS))}")
    validation_set = reasoning_gym.create_dataset(name, size=n_validation, seed=VALIDATION_SEED)
    validation = _problems(validation_set, n_validation, set())
    # Some questions turn up twice; make more than needed and leave those out.
    train_set = reasoning_gym.create_dataset(name, size=2 * n_train, seed=TRAIN_SEED)
    train = _problems(train_set, n_train, {problem.question for problem in validation})
    if len(train) < n_train:
        raise ValueError(f"n_train_examples: got {n_train}; gym/{name} gave only {len(train)} that are not validation")

    def reward_fn_for(prompt_name: str) -> RewardFn:
        def is_right(answer: str, truth: GymAnswer) -> bool:
            return validation_set.score_answer(answer.strip(), truth.entry) == 1

        return make_reward_fn(ANSWER_FINDERS[prompt_name], is_right)

    return Task(f"gym/{name}", train, validation, reward_fn_for)


def _problems(dataset, count: int, excluded: set[str]) -> list[Problem]:
    problems = []
    for i in range(len(dataset)):
        if len(problems) == count:
            break
        entry = dataset[i]
        if entry["question"] not in excluded:
            answer = GymAnswer(entry["answer"])
            answer.entry = entry
            problems.append(Problem(entry["question"], answer))
    return problems
