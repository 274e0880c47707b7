"""The in-process engine: what it samples, that it repeats itself, and that its log-probs are the trainer's."""

import copy

import numpy as np
import pytest
import torch
from bad_input import NOT_A_LIST, NOT_WHOLE, SOMETHING_ELSE, Row, check_refusal, name_of

from rlhelpers.kernels.logprobs import score_batch
from rlhelpers.kernels.tokens import pad_prompts_and_outputs
from rlhelpers.models import load_policy
from rlhelpers.rollouts import Sampling, TorchEngine, torch_engine
from rlhelpers.rollouts.torch_engine import draw_tokens, keep_nucleus

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["Question: Ada has 3 plums. How many?\nAnswer:", "User: Ben", "Question: Iris reads 4 pages.\nAnswer:"]


@pytest.fixture(scope="module")
def tiny():
    return load_policy("tiny", "cpu")


@pytest.fixture(scope="module")
def engine(tiny):
    return TorchEngine(*tiny)


def texts(rollouts):
    return [completion.text for rollout in rollouts for completion in rollout.completions]


def test_shape_and_order(engine):
    rollouts = engine.generate(PROMPTS, Sampling(n=3, max_tokens=12))
    assert [r.prompt for r in rollouts] == PROMPTS
    assert all(len(r.completions) == 3 for r in rollouts)
    for rollout in rollouts:
        assert engine.tokenizer.decode(rollout.prompt_token_ids) == rollout.prompt
        for completion in rollout.completions:
            assert 1 <= len(completion.token_ids) == len(completion.log_probs) <= 12
            assert (completion.finish_reason == "length") <= (len(completion.token_ids) == 12)


def test_a_seed_repeats_its_samples_and_another_gives_others(engine):
    first, again = (engine.generate(PROMPTS, Sampling(n=4, max_tokens=16, seed=5)) for _ in range(2))
    other = engine.generate(PROMPTS, Sampling(n=4, max_tokens=16, seed=6))
    assert first == again
    assert texts(first) != texts(other)


def test_the_same_prompt_twice_shares_no_random_numbers(engine):
    rollouts = engine.generate([PROMPTS[0]] * 2, Sampling(n=4, max_tokens=16))
    assert len(set(texts(rollouts))) > 4


def test_samples_depend_on_no_other_row(tiny):
    sampling = Sampling(n=4, max_tokens=24, stop=".", seed=1)
    whole = TorchEngine(*tiny).generate(PROMPTS, sampling)
    in_pieces = TorchEngine(*tiny, max_rows=4).generate(PROMPTS, sampling)
    assert [c.token_ids for r in whole for c in r.completions] == [
        c.token_ids for r in in_pieces for c in r.completions
    ]


def test_global_random_state_and_mode_are_left_alone(engine):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    engine.model.train()
    engine.generate(PROMPTS[:1], Sampling(max_tokens=4))
    assert engine.model.training and torch.equal(before, torch.get_rng_state())
    engine.model.eval()


def test_dropout_is_off_while_sampling(tiny_gpt2, tokenizer):
    model = tiny_gpt2(torch.float32, dropout=0.5).train()
    engine = TorchEngine(model, tokenizer)
    first, again = (engine.generate(["a b"], Sampling(n=2, max_tokens=6, seed=3)) for _ in range(2))
    assert first == again and model.training


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_that_the_trainer_computes(engine, temperature):
    """The prompts differ in length: padding on the left here, on the right there, the same numbers."""
    rollouts = engine.generate(PROMPTS, Sampling(n=3, max_tokens=20, temperature=temperature))
    rows = [(r.prompt_token_ids, c) for r in rollouts for c in r.completions]
    batch = pad_prompts_and_outputs([p for p, _ in rows], [c.token_ids for _, c in rows], 1)
    scored = score_batch(engine.model, batch["input_ids"], batch["labels"], 4, temperature)
    for i, (_, completion) in enumerate(rows):
        sampled = torch.tensor(completion.log_probs)
        torch.testing.assert_close(scored[i][batch["response_mask"][i]], sampled, atol=2e-5, rtol=0)


def test_the_stop_string_ends_the_text(engine):
    rollouts = engine.generate(PROMPTS[:1], Sampling(n=16, max_tokens=60, stop="answer", seed=2))
    stopped = [c for c in rollouts[0].completions if "answer" in c.text]
    assert stopped
    for completion in stopped:
        assert completion.finish_reason == "stop" and completion.text.endswith("answer")
        assert completion.text.count("answer") == 1
        # The ids are those that were sampled: decoded, they start with the text and may go on past the stop string.
        assert engine.tokenizer.decode(completion.token_ids).startswith(completion.text)
        assert "answer" not in engine.tokenizer.decode(completion.token_ids[:-1])


def test_end_of_text_ends_a_row_and_stays_among_the_ids(engine):
    rollouts = engine.generate(PROMPTS, Sampling(n=16, max_tokens=64))
    ended = [c for r in rollouts for c in r.completions if c.finish_reason == "stop"]
    assert ended
    for completion in ended:
        assert completion.token_ids[-1] == engine.tokenizer.eos_token_id
        assert engine.tokenizer.eos_token_id not in completion.token_ids[:-1]
        assert engine.tokenizer.eos_token not in completion.text


def test_a_model_may_know_more_tokens_than_the_tokenizer(tiny, monkeypatch):
    policy, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    policy.resize_token_embeddings(len(tokenizer) + 3)

    def draw_last(logits, *_):
        return torch.full((len(logits),), logits.shape[-1] - 1), torch.zeros(len(logits))

    monkeypatch.setattr(torch_engine, "draw_tokens", draw_last)
    [rollout] = TorchEngine(policy, tokenizer).generate(PROMPTS[:1], Sampling(n=1, max_tokens=2, stop="."))
    assert rollout.completions[0].token_ids == [len(tokenizer) + 2] * 2 and rollout.completions[0].text == ""


def test_min_tokens_puts_off_end_of_text_and_stop(engine):
    rollouts = engine.generate(PROMPTS, Sampling(n=8, max_tokens=40, min_tokens=30, stop="."))
    completions = [c for r in rollouts for c in r.completions]
    assert all(len(c.token_ids) >= 30 for c in completions)
    assert not any(engine.tokenizer.eos_token_id in c.token_ids[:30] for c in completions)


def test_greedy_is_the_argmax_and_has_finite_log_probs(engine):
    (rollout,) = engine.generate(PROMPTS[:1], Sampling(temperature=0.0, max_tokens=8))
    ids = rollout.prompt_token_ids
    for token in rollout.completions[0].token_ids:
        with torch.no_grad():
            assert token == engine.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()
        ids = [*ids, token]
    assert all(-50 < p <= 0 for p in rollout.completions[0].log_probs)


def test_drawing_follows_the_distribution():
    """10,000 draws from known probabilities: each share within four standard errors."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    n = 10_000
    uniforms = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, log_probs = draw_tokens(probabilities.log().expand(n, -1), uniforms, Sampling())
    shares = torch.bincount(tokens, minlength=5) / n
    assert ((shares - probabilities).abs() <= 4 * (probabilities * (1 - probabilities) / n).sqrt()).all()
    torch.testing.assert_close(log_probs, probabilities.log()[tokens])


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p():
    probabilities = torch.tensor([[0.05, 0.5, 0.15, 0.3]])
    assert keep_nucleus(probabilities, 0.5).tolist() == [[0, 0.5, 0, 0]]
    kept = keep_nucleus(probabilities, 0.6)
    torch.testing.assert_close(kept, torch.tensor([[0, 0.5, 0, 0.3]]))


def test_all_end_of_text_ids_count(tiny_gpt2, tokenizer):
    """Three of sixteen tokens end a text, so sixteen samples see each of them."""
    model = tiny_gpt2(torch.float32)
    model.generation_config.eos_token_id = [5, 9]
    (rollout,) = TorchEngine(model, tokenizer).generate(["a b"], Sampling(n=64, max_tokens=16))
    ended = [c.token_ids for c in rollout.completions if c.finish_reason == "stop"]
    assert {ids[-1] for ids in ended} == {1, 5, 9}
    assert not any({1, 5, 9} & set(ids[:-1]) for ids in ended)


ROWS = [
    Row("TorchEngine", "model", SOMETHING_ELSE, "policy: got "),
    Row("TorchEngine", "tokenizer", SOMETHING_ELSE),
    Row("TorchEngine", "max_rows", [*NOT_WHOLE, 0]),
    Row("TorchEngine.sync_weights", "policy", SOMETHING_ELSE),
    Row("TorchEngine.generate", "prompts", NOT_A_LIST),
    Row("TorchEngine.generate", "prompts", [["a", None], ["a", [3]], np.ones(2), [3]], "prompts: number "),
    Row("TorchEngine.generate", "prompts", [["a", ""]], "prompt 1 is empty"),
    Row("TorchEngine.generate", "prompts", [["a " * 31]], "prompt 0 has 31 tokens; with max_tokens=2 it must fit"),
    Row("TorchEngine.generate", "sampling", SOMETHING_ELSE),
]


@pytest.fixture
def good(tiny_gpt2, tokenizer):
    """Good arguments of each function."""
    model = tiny_gpt2()
    engine = TorchEngine(model, tokenizer)
    return {
        "TorchEngine": (TorchEngine, {"model": model, "tokenizer": tokenizer, "max_rows": 4}),
        "TorchEngine.sync_weights": (engine.sync_weights, {"policy": model}),
        "TorchEngine.generate": (engine.generate, {"prompts": ["a b", "c"], "sampling": Sampling(max_tokens=2)}),
    }


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(good, row):
    check_refusal(good, row)


def test_a_prompt_that_just_fits_is_sampled_from(good):
    generate, arguments = good["TorchEngine.generate"]
    [rollout] = generate(["a " * 30], arguments["sampling"])
    assert len(rollout.prompt_token_ids) == 30 and 1 <= len(rollout.completions[0].token_ids) <= 2


def test_a_refused_policy_leaves_the_engine_as_it_is(good):
    sync = good["TorchEngine.sync_weights"][0]
    before = sync.__self__.model
    with pytest.raises(ValueError, match="policy: got None"):
        sync(None)
    assert sync.__self__.model is before


def test_a_prompt_that_does_not_fit_is_named(engine):
    with pytest.raises(ValueError, match=r"prompt 1 has \d+ tokens; with max_tokens=64 it must fit .* 2048"):
        engine.generate(["User:", "word " * 2500], Sampling())


def test_no_prompts_give_no_rollouts(engine):
    assert engine.generate([], Sampling()) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(bad, temperature):
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    with pytest.raises(ValueError, match="logits: not finite"):
        draw_tokens(logits, torch.full((2,), 0.2, dtype=torch.float64), Sampling(temperature=temperature))
