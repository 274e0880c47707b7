"""The embedded world: word problems made by rule, the corpus, and that the recipe makes the model."""

import json
import random
import re

import pytest
import torch
from transformers import AutoConfig

from rlhelpers import paths
from rlhelpers.models import load_policy
from rlhelpers.rollouts import Sampling
from rlhelpers.rollouts.torch_engine import TorchEngine
from rlhelpers.tasks import Grader, get_prompt, load_task
from rlhelpers.tasks.gsm8k import final_answer
from rlhelpers.tiny import corpus
from rlhelpers.tiny.model import Recipe, build_model, checksums, make_tiny, train_tokenizer, write_problems
from rlhelpers.tiny.problems import OPERATIONS, STORIES, draw_problems, draw_solution, is_validation

SOLUTIONS = [draw_solution(random.Random(seed)) for seed in range(300)]


def test_every_sum_is_right_and_in_range():
    for solution in SOLUTIONS:
        for a, op, b, c in solution.sums:
            assert OPERATIONS[op](a, b) == c and 1 <= c <= 200
            assert op != "/" or a % b == 0


def test_every_number_comes_from_the_question_or_a_sum():
    for solution in SOLUTIONS:
        known = {int(n) for n in re.findall(r"\d+", solution.question)}
        for a, _, b, c in solution.sums:
            assert {a, b} <= known
            known.add(c)


def test_rows_are_in_gsm8k_format():
    for solution in SOLUTIONS:
        row = solution.gsm8k_row()
        assert final_answer(row["answer"]) == solution.answer
        annotated = re.findall(r"(\d+)([-+*/])(\d+)=<<(\d+)\2(\d+)=(\d+)>>(\d+)", row["answer"])
        assert len(annotated) == len(solution.sums)
        assert all(a == a2 and b == b2 and c == c2 for a, _, b, a2, b2, c, c2 in annotated)


def test_one_to_three_steps_and_all_four_operations():
    assert {len(story["steps"]) for story in STORIES} == {1, 2, 3}
    assert {op for solution in SOLUTIONS for _, op, _, _ in solution.sums} == set("+-*/")


def test_the_split_is_by_content_and_contents_are_distinct():
    train = draw_problems(random.Random(0), 400, validation=False)
    validation = draw_problems(random.Random(0), 100, validation=True)
    contents = [p.content for p in train + validation]
    assert len(set(contents)) == 500
    assert not any(is_validation(p.content) for p in train) and all(is_validation(p.content) for p in validation)


def test_the_same_seed_gives_the_same_problems():
    assert draw_problems(random.Random(3), 50, False) == draw_problems(random.Random(3), 50, False)


DOCUMENTS = [corpus.draw_document(random.Random(seed)) for seed in range(2000)]


def test_no_document_holds_a_validation_problem(monkeypatch):
    """Every problem of a document is drawn in one place, which turns validation contents away."""
    drawn = []
    monkeypatch.setattr(corpus, "draw_solution", lambda rng: drawn.append(draw_solution(rng)) or drawn[-1])
    documents = "\n".join(corpus.draw_document(random.Random(seed)) for seed in range(300))
    turned_away = [s for s in drawn if corpus.is_validation(s.content)]
    used = {s.question for s in drawn if not corpus.is_validation(s.content)}
    assert len(turned_away) > 50
    assert not any(s.question in documents for s in turned_away if s.question not in used)
    assert sum(question in documents for question in used) > 300


def test_every_ending_and_every_style_occurs():
    text = "\n".join(DOCUMENTS)
    for piece in (
        "</think> <answer> ",
        "</think>\n<answer> ",
        "<answer> The answer is ",
        "</think> \\boxed{",
        "Please put your final answer within \\boxed{}. ",
        "Question: ",
        "Solution: ",
        "Leah had 32 chocolates",
    ):
        assert piece in text


def test_wrong_sums_come_at_the_stated_rate_and_carry_through():
    rng, wrong = random.Random(0), 0
    for _ in range(2000):
        solution = draw_solution(rng)
        text, answer = corpus.reason(rng, solution)
        assert text.endswith(f"So the answer is {answer}.")
        sums = re.findall(r"(\d+)([-+*/])(\d+)=(-?\d+)", text)
        mistakes = sum(corpus.OPERATIONS[op](int(a), int(b)) != int(c) for a, op, b, c in sums)
        wrong += answer != solution.answer
        assert mistakes <= 1
    assert abs(wrong / 2000 - corpus.WRONG_SUM_RATE) < 0.04


def test_examples_keep_the_format_far_more_often_than_none():
    def share_with_tags(endings):
        return endings["tags"] / sum(endings.values())

    assert share_with_tags(corpus.FAITHFUL_ENDINGS) > 2 * share_with_tags(corpus.LOOSE_ENDINGS)


RECORD = json.loads((paths.TINY / "recipe.json").read_text(encoding="utf-8"))


def test_the_recorded_recipe_is_that_of_the_code():
    assert RECORD["recipe"] == json.loads(json.dumps(vars(Recipe())))


def test_the_files_are_those_of_the_record():
    assert checksums(paths.TINY) == RECORD["sha256"]


def test_size_and_architecture():
    assert sum(file.stat().st_size for file in paths.TINY.iterdir()) <= 8_000_000
    assert RECORD["parameters"] <= 2_000_000
    config = AutoConfig.from_pretrained(paths.TINY)
    assert config.architectures == ["Olmo2ForCausalLM"]
    model, tokenizer = load_policy("tiny", "cpu")
    assert model.num_parameters() == RECORD["parameters"] and model.dtype == torch.float32
    assert config.vocab_size == len(tokenizer)


def test_digits_are_single_tokens_and_the_special_ones_differ():
    _, tokenizer = load_policy("tiny", "cpu")
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("12+345=357", add_special_tokens=False))
    assert pieces == list("12+345=357")
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)
    text = "Any text: {é’数} \\boxed{3} \n\n  </think> <answer>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_it_scores_as_a_base_model_should():
    """The measured scores of the record: prompting matters, and there is room to learn."""
    scores = RECORD["scores"]
    zero, three, box = scores["r1_zero"], scores["r1_zero_three_shot"], scores["question_only"]
    assert 0.05 <= zero["accuracy"] <= 0.25
    assert box["accuracy"] < zero["accuracy"] and box["format"] < 0.3
    assert three["accuracy"] > zero["accuracy"] + 0.1 and three["format"] > zero["format"] + 0.1


@pytest.mark.slow
def test_the_record_is_true():
    """A fresh sample of 96 problems lies within four standard errors of the recorded accuracy."""
    model, tokenizer = load_policy("tiny", "cpu")
    task, prompt = load_task("tiny", 1, 96), get_prompt("r1_zero")
    rollouts = TorchEngine(model, tokenizer).generate(
        [prompt(p.question) for p in task.validation], Sampling(max_tokens=64, stop=prompt.stop, seed=99)
    )
    reward_fn = Grader(prompt, task.verify)
    right = [
        reward_fn(r.completions[0].text, p.answer)["reward"] for r, p in zip(rollouts, task.validation, strict=True)
    ]
    recorded = RECORD["scores"]["r1_zero"]["accuracy"]
    assert abs(sum(right) / 96 - recorded) < 4 * (recorded * (1 - recorded) / 96) ** 0.5


@pytest.mark.slow
def test_problems_and_tokenizer_are_made_again_byte_for_byte(tmp_path):
    write_problems(tmp_path, Recipe())
    train_tokenizer(Recipe()).save_pretrained(tmp_path)
    made = checksums(tmp_path)
    names = ["train.jsonl", "validation.jsonl", "tokenizer.json"]
    assert [made[name] for name in names] == [RECORD["sha256"][name] for name in names]


@pytest.mark.slow
def test_the_whole_recipe_runs_in_small(tmp_path):
    small = Recipe(
        train_problems=8, validation_problems=4, tokenizer_documents=200, phases=((4, 64), (2, 128)),
        tokens_per_step=512, scored_problems=4, hidden_size=32, intermediate_size=64, layers=1, heads=2,
    )  # fmt: skip
    make_tiny(tmp_path, small)
    record = json.loads((tmp_path / "recipe.json").read_text(encoding="utf-8"))
    assert set(record["sha256"]) == set(RECORD["sha256"])
    assert set(record["scores"]) == set(RECORD["scores"])
    model, tokenizer = load_policy(str(tmp_path), "cpu")
    assert len(tokenizer) == model.config.vocab_size


@pytest.mark.parametrize("seed", [0, 1])
def test_the_seed_decides_the_first_weights(seed):
    tokenizer = load_policy("tiny", "cpu")[1]
    first, again = (build_model(Recipe(seed=seed), tokenizer).lm_head.weight for _ in range(2))
    other = build_model(Recipe(seed=seed + 1), tokenizer).lm_head.weight
    assert torch.equal(first, again) and not torch.equal(first, other)
