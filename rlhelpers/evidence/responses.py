"""Responses as a table: read from a file, graded, counted, and compared with a person's verdicts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from rlhelpers.checks import check_kind, check_texts, check_whole
from rlhelpers.evidence.runs import check_table
from rlhelpers.tasks.datasets import read_objects
from rlhelpers.tasks.grading import Grader, Verifier, probably_right, read_truth, verify_answer
from rlhelpers.tasks.prompts import PROMPTS, get_prompt

REQUIRED = {
    "prompt": f"the prompt's name: {', '.join(PROMPTS)}",
    "question": "the question, without the prompt around it",
    "ground_truth": "the right answer, a short text such as 18",
    "response": "what the model wrote, with its tags and its stop string",
}
OPTIONAL = {
    "run": "the run that it belongs to; runs are counted apart",
    "finish_reason": "stop or length",
    "human": 'a person\'s verdict, {"verdict": "correct"}, "incorrect" or "ambiguous"',
}
FIELDS = REQUIRED | OPTIONAL  # of a line; all texts except `human`; others are not read

# The handout's (1) to (3).  There is no fourth: without the format no answer is found.
CATEGORIES = ("format 1, answer 1", "format 1, answer 0", "format 0, answer 0")
VERDICTS = ("correct", "incorrect", "ambiguous")


def read_responses(path: str | Path, also: Sequence[str] = ()) -> pd.DataFrame:
    """The responses of a JSONL file, plain or .gz: a row for each line, a column for each of FIELDS and of `also`.

    Where a line has no `run`, it is the file's name; other fields that are missing are None.  `human` is the verdict.
    Raises FileNotFoundError, or ValueError naming file, line and the accepted fields.
    """
    check_kind((str, Path), "a file", responses=path)
    check_texts(also=also)
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"responses: got {str(path)!r}; there is no such file; {_accepted()}")
    try:
        rows = [_read_row(path, number, row, also) for number, row in read_objects(path)]
    except ValueError as error:
        raise ValueError(f"{error}; {_accepted()}") from error
    return pd.DataFrame(rows, columns=[*FIELDS, *also], dtype=object)  # so that None stays None


def _read_row(path: Path, number: int, row: dict[str, Any], also: Sequence[str]) -> dict[str, Any]:
    run = path.name.partition(".")[0] if row.get("run") is None else str(row["run"])
    try:
        return _checked(row) | {"run": run} | {name: row.get(name) for name in also}
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}") from error


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    for name in REQUIRED:
        if not isinstance(row.get(name), str):
            raise ValueError(f"{name}: got {row[name]!r}" if name in row else f"the field {name} is missing")
    get_prompt(row["prompt"])
    read_truth(row["ground_truth"])
    human = row.get("human")
    verdict = human.get("verdict") if isinstance(human, dict) else human
    if verdict is not None and verdict not in VERDICTS:
        raise ValueError(f"human: got {human!r}")
    return {name: row.get(name) for name in FIELDS} | {"human": verdict}


def _accepted() -> str:
    return (
        f"accepted is one JSON object a line with the fields {', '.join(REQUIRED)} (texts) and, optionally, "
        f"{', '.join(OPTIONAL)}"
    )


def grade_responses(table: pd.DataFrame, verify: Verifier = verify_answer) -> pd.DataFrame:
    """Add five columns to the table.

    `reward` (0.0 or 1.0), `category` (of CATEGORIES), `reason` (of REASONS), `boxes_agree`, and `in_substance`: what
    `probably_right` says, whatever the grade.
    """
    check_table(*REQUIRED, table=table)
    grades = []
    for row in table.itertuples():
        grade = Grader(get_prompt(row.prompt), verify).grade(row.response, row.ground_truth)
        grades.append(
            {
                "reward": grade.answer,
                "category": f"format {grade.format:.0f}, answer {grade.answer:.0f}",
                "reason": grade.reason,
                "boxes_agree": grade.boxes_agree,
                "in_substance": probably_right(row.response, row.ground_truth),
            }
        )
    return table.join(pd.DataFrame(grades, index=table.index))


def category_counts(graded: pd.DataFrame) -> pd.DataFrame:
    """Responses per run and prompt (rows) and category (columns, all of CATEGORIES)."""
    check_table("run", "prompt", "category", graded=graded)
    counts = pd.crosstab([graded.run, graded.prompt], graded.category)
    return counts.reindex(columns=list(CATEGORIES), fill_value=0)


def draw_examples(graded: pd.DataFrame, count: int, seed: int) -> pd.DataFrame:
    """Draw `count` rows at random, from runs and prompts in turn; all rows where there are fewer."""
    check_table("run", "prompt", graded=graded)
    check_whole(0, count=count, seed=seed)
    shuffled = graded.sample(frac=1, random_state=seed % 2**32)  # numpy takes no larger seed
    turn = shuffled.groupby(["run", "prompt"]).cumcount()
    return shuffled.loc[turn.sort_values(kind="stable").index[:count]]


def agreement(rule: pd.Series, verdicts: pd.Series) -> dict[str, float]:
    """Compare a rule's yes or no with a person's `verdicts`: True, False, or missing, which is left out.

    `precision`: the share of the rule's yes that the person confirms.  `recall`: the share of the person's yes that the
    rule finds.  nan where there is no such case.
    """
    check_kind(pd.Series, "a column of a table", rule=rule, verdicts=verdicts)
    if not rule.index.equals(verdicts.index):
        raise ValueError(f"rule, verdicts: got {len(rule)} and {len(verdicts)} rows; accepted are columns of one table")
    judged = verdicts.notna()
    rule, truth = rule[judged].astype(bool), verdicts[judged].astype(bool)
    both = int((rule & truth).sum())
    return {
        "judged": int(judged.sum()),
        "right": int(truth.sum()),
        "rule says right": int(rule.sum()),
        "both": both,
        "precision": both / int(rule.sum()) if rule.any() else float("nan"),
        "recall": both / int(truth.sum()) if truth.any() else float("nan"),
    }
