"""Graders side by side, on the same responses: ours, math-verify alone, and the course's where it is at hand."""

import random
import runpy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from math_verify import parse, verify

from rlhelpers.bench.measure import Clock, Spread, in_turns
from rlhelpers.bench.report import Report, conditions
from rlhelpers.evidence.responses import read_responses
from rlhelpers.tasks import algebra, answers, grading
from rlhelpers.tasks.grading import Grade, grade
from rlhelpers.tasks.prompts import get_prompt
from rlhelpers.tiny.corpus import FAITHFUL_ENDINGS, LOOSE_ENDINGS, closing
from rlhelpers.tiny.problems import draw_problems
from rlhelpers.training.provenance import installed_versions

ROUNDS = 5
OURS, MATH_VERIFY, COURSE, IN_THE_FILE = "rlhelpers", "math-verify", "course", "in the file"
CACHES = (grading._tidy_truth, answers._read, algebra.compare)
REWARDS = ("format_reward", "answer_reward")
REWARD_FNS = ("r1_zero_reward_fn", "question_only_reward_fn")

NOTES = [
    "ms per 1,000: median (lowest to highest) of rounds in turns, in one thread, after a warm-up.",
    "math-verify: parse and verify on what the prompt's box holds, and only where the format is kept.",
    "agrees: the share of responses with the same format reward and the same answer reward as by rlhelpers.",
    "reasons: what rlhelpers says where the two differ, and how often.",
]

Verdict = tuple[float, float]
"""Format reward and answer reward, each 0.0 or 1.0."""
Row = tuple[str, str, str]
"""A response, its ground truth, and the prompt's name."""
VerdictFn = Callable[[str, str, str], Verdict]


def bench_grader(responses: str | Path | None = None, course: str | Path | None = None, rounds: int = ROUNDS) -> Report:
    """Grade a file of responses (`read_responses`; None: invented ones) by each grader.

    `course`: a python file with the functions REWARD_FNS (response, ground truth).  It and math-verify run in this
    process, with the time limits that they set themselves.  Raise ValueError or OSError naming what is wrong with a
    file.
    """
    graders = {OURS: our_verdict, MATH_VERIFY: math_verify_verdict}
    if course is not None:
        graders[COURSE] = load_course(course)
    table = invented_responses() if responses is None else read_responses(responses, also=REWARDS)
    in_the_file = rewards_in(table)
    found = conditions()
    found["versions"] |= installed_versions(("math-verify", "sympy"))
    rows = list(zip(table.response, table.ground_truth, table.prompt, strict=True))
    places = table.groupby(["run", "prompt"]).indices
    groups = {f"{run}, {prompt}": indices.tolist() for (run, prompt), indices in places.items()}
    grades = [grade(*row) for row in rows]
    verdicts = {name: give_verdicts(name, grader, rows) for name, grader in graders.items()}  # a warm-up too
    del verdicts[OURS]
    if any(in_the_file):
        verdicts[IN_THE_FILE] = in_the_file
    measured = {}
    for name, group in groups.items():
        chosen = [rows[i] for i in group]
        measured[name] = in_turns({n: partial(_measure, grader, chosen) for n, grader in graders.items()}, rounds)
    source = "invented" if responses is None else Path(responses).name
    return report(found, source, groups, grades, verdicts, measured)


def our_verdict(response: str, ground_truth: str, prompt: str) -> Verdict:
    found = grade(response, ground_truth, prompt)
    return found.format, found.answer


def math_verify_verdict(response: str, ground_truth: str, prompt: str) -> Verdict:
    r"""Ask math-verify about what the prompt's box holds, and only where the format is kept."""
    # On a whole response, as its users often have it, the verdict is another, and slower: it knows no answer tags and
    # takes the last number where there is no box.  It takes LaTeX only in a box; text between tags it reads faster.
    boxes = get_prompt(prompt).find_boxes(response)
    if not boxes.has_format or boxes.last is None:
        return float(boxes.has_format), 0.0
    answer = rf"\boxed{{{boxes.last}}}" if prompt == "question_only" else boxes.last
    return 1.0, float(verify(parse(rf"\boxed{{{ground_truth}}}"), parse(answer)))


def load_course(file: str | Path) -> VerdictFn:
    """Run the file; return the verdicts of the course's two functions in it.  Raise ValueError where that fails or they
    are not in it."""
    try:
        found = runpy.run_path(str(file))
        r1_zero, question_only = (found[name] for name in REWARD_FNS)
    except (Exception, SystemExit) as error:
        accepted = f"accepted is a python file with {' and '.join(REWARD_FNS)}"
        raise ValueError(f"course: got {str(file)!r}; {error!r}; {accepted}") from error

    def verdict(response: str, ground_truth: str, prompt: str) -> Verdict:
        rewards = (question_only if prompt == "question_only" else r1_zero)(response, ground_truth)
        return rewards["format_reward"], rewards["answer_reward"]

    return verdict


def invented_responses(count: int = 500) -> pd.DataFrame:
    """Return `count` responses for each prompt, as the tiny base model's corpus has them, to validation problems."""
    rng = random.Random(0)
    endings = {
        "r1_zero": LOOSE_ENDINGS,
        "r1_zero_three_shot": FAITHFUL_ENDINGS,
        "question_only": {"boxed": 1, "no tags": 1},
    }
    rows = [
        {"run": "invented", "prompt": prompt, "ground_truth": problem.answer, "response": closing(rng, problem, kinds)}
        for prompt, kinds in endings.items()
        for problem in draw_problems(rng, count, validation=True)
    ]
    return pd.DataFrame(rows).assign(**dict.fromkeys(REWARDS, None))


def rewards_in(table: pd.DataFrame) -> list[Verdict | None]:
    """Return what the file says that another grader gave.  Raise ValueError for a reward that is neither 0 nor 1."""
    for name in REWARDS:
        for number, value in enumerate(table[name], start=1):
            if value is not None and value not in (0, 1):
                raise ValueError(f"{name}: got {value!r} in response {number}; accepted is 0 or 1, or no such field")
    pairs = zip(*(table[name] for name in REWARDS), strict=True)
    return [None if None in pair else (float(pair[0]), float(pair[1])) for pair in pairs]


def give_verdicts(name: str, grader: VerdictFn, rows: Sequence[Row]) -> list[Verdict]:
    """Raise ValueError naming grader and response where it raises, or gives anything but zeros and ones."""
    verdicts = []
    for row in rows:
        try:
            verdicts.append(grader(*row))
            if any(reward not in (0, 1) for reward in verdicts[-1]):
                raise ValueError(f"it gave {verdicts[-1]}")
        except Exception as error:
            accepted = f"accepted are the rewards {' and '.join(REWARDS)}, each 0 or 1"
            raise ValueError(f"{name}: {error!r} for {row[0][-80:]!r} against {row[1]!r}; {accepted}") from error
    return verdicts


def _measure(grader: VerdictFn, rows: Sequence[Row], number: int) -> float:
    """Return milliseconds per 1,000 responses.  Ours begins without what it remembers from the round before."""
    for cached in CACHES:
        cached.cache_clear()
    with Clock() as clock:
        for row in rows:
            grader(*row)
    return clock.seconds / len(rows) * 1e6


def report(
    found: Mapping, source: str, groups: Mapping, grades: Sequence[Grade], verdicts: Mapping, measured: Mapping
) -> Report:
    """Make a row for each group and grader, and one for its agreement with ours.

    `groups`: the places of their responses in `grades` and in each of the `verdicts`; `measured`: by group and grader,
    a time for each round.
    """
    rows = []
    for group, by_grader in measured.items():
        for grader, turns in by_grader.items():
            times = {"ms_per_1,000": Spread.of(turns), "time_ratio": Spread.of_ratios(turns, by_grader[OURS])}
            rows.append({"run, prompt": group, "responses": len(groups[group]), "grader": grader, **times})
    for name, given in verdicts.items():
        for group, places in {"all": range(len(grades)), **groups}.items():
            found_there = agreement([grades[i] for i in places], [given[i] for i in places])
            rows.append({"verdict": name, "of": group, **found_there})
    rounds = len(next(iter(measured.values()))[OURS])
    return Report("grader", found, {"source": source, "responses": len(grades), "rounds": rounds}, rows, NOTES)


def agreement(grades: Sequence[Grade], verdicts: Sequence[Verdict | None]) -> dict[str, Any]:
    """Compare our grades with another's verdicts, over the responses that have one."""
    pairs = [(grade, verdict) for grade, verdict in zip(grades, verdicts, strict=True) if verdict is not None]
    different = [grade.reason for grade, verdict in pairs if (grade.format, grade.answer) != verdict]
    return {
        "responses": len(pairs),
        "agrees": 1 - len(different) / len(pairs) if pairs else None,
        "differences": len(different),
        "in_format": sum(grade.format != verdict[0] for grade, verdict in pairs),
        "in_answer": sum(grade.answer != verdict[1] for grade, verdict in pairs),
        "reasons": dict(Counter(different).most_common()),
    }
