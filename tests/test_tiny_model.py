"""The embedded model: its recipe, its checksums, and that the recipe makes it."""

import json

import pytest
import torch
from transformers import AutoConfig

from rlhelpers import paths
from rlhelpers.models import load_policy
from rlhelpers.rollouts import Sampling
from rlhelpers.rollouts.torch_engine import TorchEngine
from rlhelpers.tasks import Grader, get_prompt, load_task
from rlhelpers.tiny.model import Recipe, build_model, checksums, make_tiny, train_tokenizer, write_problems

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


def test_problems_and_tokenizer_are_made_again_byte_for_byte(tmp_path):
    write_problems(tmp_path, Recipe())
    train_tokenizer(Recipe()).save_pretrained(tmp_path)
    made = checksums(tmp_path)
    names = ["train.jsonl", "validation.jsonl", "tokenizer.json"]
    assert [made[name] for name in names] == [RECORD["sha256"][name] for name in names]


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
