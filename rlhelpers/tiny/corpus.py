"""What the tiny base model reads: documents as untidy as the web, made by rule.

A base model knows more than it shows.  So the documents hold good reasoning in many formats: conversations with
the tags right, wrong, or missing; lists of solved examples that keep one format from top to bottom, so that a
prompt with examples is worth more than one without; boxes that were asked for and forgotten; and wrong sums.
"""

import random

from rlhelpers.tasks.prompts import get_prompt
from rlhelpers.tiny.problems import OPERATIONS, Solution, draw_solution, is_validation

WRONG_SUM_RATE = 0.25  # of the solutions that are not shown as examples
BOXED_RATE = 0.06  # of the answers to "Please put your final answer within \boxed{}."

# How an answer closes when nothing before it shows how: format and weight.
LOOSE_ENDINGS = {
    "tags": 10,
    "newline between tags": 18,
    "no closing think": 18,
    "sentence in the box": 14,
    "boxed": 6,
    "no tags": 22,
    "ramble": 10,
}
# With solved examples before it, most answers do as the examples did.
FAITHFUL_ENDINGS = {"tags": 88, "newline between tags": 4, "no tags": 4, "ramble": 4}
# Formats of a list of solved examples, and their weights.
LIST_STYLES = (
    ("User: {q}\nAssistant: <think> {s} </think> <answer> {a} </answer>\n", 1),
    ("Question: {q}\nAnswer: {s}\n\n", 4),
    ("{q}\n{s}\n\n", 3),
    ("Problem: {q}\nSolution: {s} \\boxed{{{a}}}\n\n", 1),
)


def draw_document(rng: random.Random) -> str:
    """One document of the mixture.  Validation contents never occur in it."""
    kind = rng.choices((conversation, solved_list, box_request, plain_sums), (6, 6, 2, 1))[0]
    return kind(rng)


def conversation(rng: random.Random) -> str:
    """A prompt of the workbook with no, random, or the well-known three examples, and an answer."""
    # Examples are rare: after the preamble alone, the first of them looks like an answer that was given without any.
    examples = rng.choices(("none", "random", "known"), (14, 1, 2))[0]
    problem = _draw_training_solution(rng)
    name = "r1_zero_three_shot" if examples == "known" else "r1_zero"
    prompt = get_prompt(name)(problem.question)
    if examples == "random":
        preamble, rest = prompt.split("\nUser: ")
        shown = [_example(_draw_training_solution(rng)) for _ in range(rng.randint(1, 3))]
        prompt = "\nUser: ".join([preamble, *shown, rest])
    return prompt + closing(rng, problem, LOOSE_ENDINGS if examples == "none" else FAITHFUL_ENDINGS)


def closing(rng: random.Random, problem: Solution, endings: dict[str, int]) -> str:
    """What follows `<think>`: the reasoning and one of the endings."""
    reasoning, answer = reason(rng, problem)
    ending = rng.choices(list(endings), list(endings.values()))[0]
    another = _draw_training_solution(rng)
    return {
        "tags": f" {reasoning} </think> <answer> {answer} </answer>",
        "newline between tags": f" {reasoning} </think>\n<answer> {answer} </answer>",
        "no closing think": f" {reasoning} <answer> {answer} </answer>",
        "sentence in the box": f" {reasoning} </think> <answer> The answer is {answer}. </answer>",
        "boxed": f" {reasoning} </think> \\boxed{{{answer}}}",
        "no tags": f" {reasoning}",
        "ramble": f" {reasoning}\nUser: {another.question}\nAssistant: {reason(rng, another)[0]}",
    }[ending]


def solved_list(rng: random.Random) -> str:
    """Two to five solved problems in one style."""
    styles, weights = zip(*LIST_STYLES, strict=True)
    style = rng.choices(styles, weights)[0]
    entries = []
    for _ in range(rng.randint(2, 5)):
        problem = _draw_training_solution(rng)
        reasoning, answer = reason(rng, problem)
        entries.append(style.format(q=problem.question, s=reasoning, a=answer))
    return "".join(entries).rstrip("\n")


def box_request(rng: random.Random) -> str:
    """The question_only prompt and an answer that mostly forgets the box."""
    problem = _draw_training_solution(rng)
    reasoning, answer = reason(rng, problem)
    box = f" \\boxed{{{answer}}}" if rng.random() < BOXED_RATE else ""
    return f"{get_prompt('question_only')(problem.question)} {reasoning}{box}"


def plain_sums(rng: random.Random) -> str:
    """Sums as in a school book, some of them wrong."""
    lines = []
    for _ in range(rng.randint(8, 16)):
        a, op, b, c = rng.choice(_draw_training_solution(rng).sums)
        lines.append(f"{a}{op}{b}={c}")
    return " ".join(lines)


def reason(rng: random.Random, problem: Solution) -> tuple[str, str]:
    """The solution as running text and the answer it arrives at; now and then one sum on the way is wrong."""
    if rng.random() >= WRONG_SUM_RATE:
        return _running_text(problem.sentences, problem.answer), problem.answer
    sentences, answer = _with_a_wrong_sum(rng, problem)
    return _running_text(sentences, answer), answer


def _with_a_wrong_sum(rng: random.Random, problem: Solution) -> tuple[list[str], str]:
    """One result is off by a little, and what follows is worked out from it."""
    wrong_step = rng.randrange(len(problem.sums))
    replaced: dict[int, int] = {}
    sentences = []
    for step, (sentence, (a, op, b, c)) in enumerate(zip(problem.sentences, problem.sums, strict=True)):
        new_a, new_b = replaced.get(a, a), replaced.get(b, b)
        result = OPERATIONS[op](new_a, new_b)
        if step == wrong_step:
            result += rng.choice((-10, -3, -2, -1, 1, 2, 3, 10))
        if step >= wrong_step:
            replaced[c] = result
        sentences.append(sentence.replace(f"{a}{op}{b}={c}", f"{new_a}{op}{new_b}={result}", 1))
    return sentences, str(result)


def _running_text(sentences, answer: str) -> str:
    return " ".join([*sentences, f"So the answer is {answer}."])


def _example(problem: Solution) -> str:
    reasoning = _running_text(problem.sentences, problem.answer)
    return f"{problem.question}\nAssistant: <think> {reasoning} </think> <answer> {problem.answer} </answer>"


def _draw_training_solution(rng: random.Random) -> Solution:
    while is_validation((solution := draw_solution(rng)).content):
        pass
    return solution
