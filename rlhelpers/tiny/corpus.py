"""The documents that the tiny base model reads: as untidy as the web, made by rule.

A base model knows more than it shows.  So the documents hold good reasoning in many formats: conversations with right,
wrong and missing tags; lists of solved examples that keep one format from top to bottom, which makes a prompt with
examples worth more than one without; boxes that were asked for and forgotten; and wrong sums.
"""

import random

from rlhelpers.tasks.prompts import get_prompt
from rlhelpers.tiny.problems import OPERATIONS, Solution, draw_solution, is_validation

WRONG_SUM_RATE = 0.25  # of the solutions that are not shown as examples
BOXED_RATE = 0.06  # of the answers to "Please put your final answer within \boxed{}."

# The end of an answer: {s} its solution, {a} its answer, {q} another question, {t} the solution of that.
ENDINGS = {
    "tags": " {s} </think> <answer> {a} </answer>",
    "newline between tags": " {s} </think>\n<answer> {a} </answer>",
    "no closing think": " {s} <answer> {a} </answer>",
    "sentence in the box": " {s} </think> <answer> The answer is {a}. </answer>",
    "boxed": " {s} </think> \\boxed{{{a}}}",
    "no tags": " {s}",
    "ramble": " {s}\nUser: {q}\nAssistant: {t}",
}
# Their weights after a question alone, and after solved examples, whose format most answers keep.
LOOSE_ENDINGS = dict(zip(ENDINGS, (10, 18, 18, 14, 6, 22, 10), strict=True))
FAITHFUL_ENDINGS = {"tags": 88, "newline between tags": 4, "no tags": 4, "ramble": 4}
# The formats of a list of solved examples, and their weights.
LIST_STYLES = {
    "User: {q}\nAssistant: <think> {s} </think> <answer> {a} </answer>\n": 1,
    "Question: {q}\nAnswer: {s}\n\n": 4,
    "{q}\n{s}\n\n": 3,
    "Problem: {q}\nSolution: {s} \\boxed{{{a}}}\n\n": 1,
}


def draw_document(rng: random.Random) -> str:
    """Draw one document.  No validation content occurs in it."""
    return _choose(rng, {conversation: 6, solved_list: 6, box_request: 2, plain_sums: 1})(rng)


def conversation(rng: random.Random) -> str:
    """Draw an r1 prompt with no, random, or the well-known three examples, and an answer."""
    # Examples are rare: after the preamble alone, the first of them looks like an answer that was given without any.
    examples = _choose(rng, {"none": 14, "random": 1, "known": 2})
    problem = _draw_training_solution(rng)
    prompt = get_prompt("r1_zero_three_shot" if examples == "known" else "r1_zero")(problem.question)
    if examples == "random":
        preamble, rest = prompt.split("\nUser: ")
        shown = [_example(_draw_training_solution(rng)) for _ in range(rng.randint(1, 3))]
        prompt = "\nUser: ".join([preamble, *shown, rest])
    return prompt + closing(rng, problem, LOOSE_ENDINGS if examples == "none" else FAITHFUL_ENDINGS)


def closing(rng: random.Random, problem: Solution, endings: dict[str, int]) -> str:
    """Draw what follows `<think>`: the reasoning and one of the endings."""
    reasoning, answer = reason(rng, problem)
    ending = _choose(rng, endings)
    another = _draw_training_solution(rng)  # also where the ending has no place for it
    return ENDINGS[ending].format(s=reasoning, a=answer, q=another.question, t=reason(rng, another)[0])


def solved_list(rng: random.Random) -> str:
    """Draw two to five solved problems in one style."""
    style, entries = _choose(rng, LIST_STYLES), []
    for _ in range(rng.randint(2, 5)):
        problem = _draw_training_solution(rng)
        reasoning, answer = reason(rng, problem)
        entries.append(style.format(q=problem.question, s=reasoning, a=answer))
    return "".join(entries).rstrip("\n")


def box_request(rng: random.Random) -> str:
    """Draw the question_only prompt and an answer, which mostly forgets the box."""
    problem = _draw_training_solution(rng)
    reasoning, answer = reason(rng, problem)
    box = f" \\boxed{{{answer}}}" if rng.random() < BOXED_RATE else ""
    return f"{get_prompt('question_only')(problem.question)} {reasoning}{box}"


def plain_sums(rng: random.Random) -> str:
    """Draw right sums, as in a school book."""
    sums = (rng.choice(_draw_training_solution(rng).sums) for _ in range(rng.randint(8, 16)))
    return " ".join(f"{a}{op}{b}={c}" for a, op, b, c in sums)


def reason(rng: random.Random, problem: Solution) -> tuple[str, str]:
    """Return the solution as running text and its answer; at WRONG_SUM_RATE one sum on the way is wrong."""
    if rng.random() >= WRONG_SUM_RATE:
        return _running_text(problem.sentences, problem.answer), problem.answer
    sentences, answer = _with_a_wrong_sum(rng, problem)
    return _running_text(sentences, answer), answer


def _with_a_wrong_sum(rng: random.Random, problem: Solution) -> tuple[list[str], str]:
    """Put one result off by a little, and compute what follows from it."""
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


def _choose(rng: random.Random, weights: dict):
    return rng.choices(list(weights), list(weights.values()))[0]
