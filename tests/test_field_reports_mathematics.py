"""What people met with other trainers' mathematics, one test for each report, under the report's number.

Where a report leaves a choice, its test pins ours.  The report's `aggregation` is `loss_normalization`; no mean over
all tokens is offered, but "constant" with their number as the constant is one.  What has no test here or in
test_field_reports_training.py stands in field_reports.md.
"""

import ast
import copy
import inspect
import json
import math
import random
import re

import pytest
import torch
from one_step import step, weights
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rlhelpers import paths
from rlhelpers.kernels import (
    aggregate_loss_across_microbatch,
    compute_group_normalized_rewards,
    compute_policy_gradient_loss,
    compute_rollout_rewards,
    get_response_log_probs,
    grpo_train_step,
    tokenize_prompt_and_output,
)
from rlhelpers.kernels.advantages import signal_fraction
from rlhelpers.kernels.estimators import ESTIMATORS, MAX_LOG_RATIO, Estimator, importance_ratio, token_clip
from rlhelpers.kernels.fused_logprobs import log_probs_and_entropy
from rlhelpers.kernels.logprobs import engine_mismatch, log_probs_from_logits, score_batch
from rlhelpers.kernels.losses import masked_mean
from rlhelpers.kernels.tokens import encode, pad_prompts_and_outputs
from rlhelpers.rollouts import Sampling, TorchEngine
from rlhelpers.rollouts.engine import encode_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

RATIO_METHODS = ("noclip", "grpo", "gspo", "cispo")
AGGREGATIONS = (
    {"loss_normalization": "sequence"},
    {"loss_normalization": "constant", "normalization_constant": 40.0},
)


def make_rows(rewards, lengths, group_size=4):
    """(prompt, response, reward) of every rollout: one random prompt for each group."""
    words = random.Random(0)
    prompts = [" ".join(words.choices("abcdefghijklm", k=words.randint(1, 4))) for _ in rewards[::group_size]]
    responses = [" ".join(words.choices("abcdefghijklm", k=n)) for n in lengths]
    return [(prompts[i // group_size], response, rewards[i]) for i, response in enumerate(responses)]


EIGHT = make_rows([1.0, 0.0, 0.0, 1.0, 0.5, 1.0, 0.0, 0.0], [3, 1, 6, 2, 4, 5, 1, 7])


def change(model, tokenizer, rows, *args, **arguments):
    """What a step of SGD with learning rate 1 takes from the weights, which is the gradient; loss; metadata."""
    stepped = copy.deepcopy(model)
    loss, metadata = step(stepped, tokenizer, rows, *args, **arguments)
    return weights(model) - weights(stepped), loss.item(), metadata


def unsplit(model, tokenizer, rows, group_size=4, loss_normalization="sequence", normalization_constant=None):
    """Gradient and loss of the whole batch in one backward pass: nothing pruned, sorted, shared or cut."""
    prompts, responses, rewards = zip(*rows, strict=True)
    batch = tokenize_prompt_and_output(prompts, responses, tokenizer)
    advantages, _ = compute_group_normalized_rewards(torch.tensor(rewards), group_size)
    scores = get_response_log_probs(model, batch["input_ids"], batch["labels"])
    loss, _ = compute_policy_gradient_loss(advantages, scores["log_probs"])
    mask = batch["response_mask"]
    loss = aggregate_loss_across_microbatch(loss, mask, loss_normalization, normalization_constant)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]), loss.item()


def same(found, expected, atol=1e-6):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol, check_dtype=False)


def ratios(values, **options):
    """log-probs of a policy that are these ratios to an old one whose log-probs are all -1, and those."""
    policy = torch.tensor(values).log() - 1
    return policy.requires_grad_(**options), torch.full_like(policy, -1.0).detach()


# --- one gradient, however the batch is cut --------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda value: value["loss_normalization"])
@pytest.mark.parametrize("microbatch_size", [1, 2, 4])
def test_b01_a_step_is_divided_by_its_own_batch(aggregation, microbatch_size, tiny_gpt2, tokenizer):
    """Eight rollouts, two optimizer steps of four."""
    model = tiny_gpt2()
    for rows in (EIGHT[:4], EIGHT[4:]):
        expected, _ = unsplit(model, tokenizer, rows, **aggregation)
        before = weights(model)
        step(model, tokenizer, rows, cuts=4 // microbatch_size, **aggregation)
        assert expected.norm() > 0.01
        same(before - weights(model), expected)


@pytest.mark.parametrize(
    ("losses", "cuts", "by_sequence", "by_token"),
    [
        ([[1, 1, 1, 1], [4]], (1, 2), 2.5, 8 / 5),
        ([[1, 1, 1, 1], [4], [2, 2]], (1, 2, 3), 7 / 3, 12 / 7),
    ],
)
def test_b02_the_loss_of_a_batch_is_no_mean_of_means(losses, cuts, by_sequence, by_token, tiny_gpt2, tokenizer):
    width, tokens = max(map(len, losses)), sum(map(len, losses))
    table = torch.tensor([row + [0] * (width - len(row)) for row in losses], dtype=torch.float64)
    rows = [("a", " ".join("bcdef"[: len(row)]), 1.0) for row in losses]

    def given(advantages, policy_log_probs, old_log_probs, cliprange, mask):
        return old_log_probs + 0 * policy_log_probs, torch.zeros_like(mask)

    settings = {"baseline": "none", "advantage_normalizer": "none", "importance_reweighting_method": given}
    settings |= {"old_log_probs": table}
    by_tokens = {"loss_normalization": "constant", "normalization_constant": tokens}
    for cut in cuts:
        _, loss, _ = change(tiny_gpt2(), tokenizer, rows, 1, cuts=cut, **settings)
        assert loss == pytest.approx(by_sequence)
        _, loss, _ = change(tiny_gpt2(), tokenizer, rows, 1, cuts=cut, **settings, **by_tokens)
        assert loss == pytest.approx(by_token)


def test_b03_a_constant_divides_whatever_the_padding():
    found = []
    for width in (4, 8, 32):
        loss, mask = torch.full((2, width), 9.0), torch.zeros(2, width)  # what stands in the padding
        loss[0, :4], loss[1, 0] = 1.0, 4.0
        mask[0, :4], mask[1, 0] = 1, 1
        loss.requires_grad_()
        value = aggregate_loss_across_microbatch(loss, mask, "constant", normalization_constant=8)
        value.backward()
        found.append((value.item(), loss.grad[:, :4].tolist(), loss.grad[:, 4:].abs().sum().item()))
    assert found == [(1.0, [[0.125] * 4, [0.125, 0, 0, 0]], 0.0)] * 3


def test_b04_every_documented_argument_exists_and_is_used(tiny_gpt2, tokenizer):
    parameters = inspect.signature(grpo_train_step).parameters
    _, _, metadata = change(tiny_gpt2(), tokenizer, EIGHT)
    named = set(re.findall(r"`(\w+)`", inspect.getdoc(grpo_train_step)))
    assert named - {"policy_gradient_step"} <= set(parameters) | set(metadata)
    for notebook in sorted((paths.ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
            calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
            for call in [call for call in calls if ast.unparse(call.func).endswith("grpo_train_step")]:
                assert {keyword.arg for keyword in call.keywords} - {None} <= set(parameters), notebook.name
    by_sequence, _, _ = change(tiny_gpt2(), tokenizer, EIGHT, loss_normalization="sequence")
    eighty, forty = (
        change(tiny_gpt2(), tokenizer, EIGHT, loss_normalization="constant", normalization_constant=z)[0]
        for z in (80, 40)
    )
    same(eighty, forty / 2)
    assert (by_sequence - forty).norm() > 1e-3


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda value: value["loss_normalization"])
def test_b05_the_loss_is_divided_before_the_backward_pass(aggregation, tiny_gpt2, tokenizer):
    expected, expected_loss = unsplit(tiny_gpt2(), tokenizer, EIGHT, **aggregation)
    for cuts in (1, 4):
        found, loss, _ = change(tiny_gpt2(), tokenizer, EIGHT, cuts=cuts, **aggregation)
        same(found, expected)
        assert loss == pytest.approx(expected_loss, abs=1e-6)


# --- groups and rewards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalizer", ["std", "mean", "none"])
def test_b06_a_group_of_one_has_no_baseline_of_its_own(normalizer):
    """Policy: an error, for its advantages would all be 0 and nothing would be learned; without a baseline the reward
    stays."""
    rewards = torch.tensor([1.0, 0.0])
    with pytest.raises(ValueError, match="group_size: got 1"):
        compute_group_normalized_rewards(rewards, 1, "mean", advantage_normalizer=normalizer)
    if normalizer == "std":
        with pytest.raises(ValueError, match="group_size: got 1"):
            compute_group_normalized_rewards(rewards, 1, "none", advantage_normalizer=normalizer)
    else:
        advantages, _ = compute_group_normalized_rewards(rewards, 1, "none", advantage_normalizer=normalizer)
        same(advantages, rewards)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, "1", "none"])
def test_b09_a_reward_that_is_no_number_is_an_error_that_names_its_response(bad):
    rewards = {"a": 1.0, "b": bad, "c": 0.0}
    with pytest.raises(ValueError, match=r"reward_fn: reward of response 1 is .*a finite number"):
        compute_rollout_rewards(lambda r, _: {"reward": rewards[r], "format_reward": 1}, ["a", "b", "c"], ["x"] * 3)


def test_b09_nor_do_advantages_take_it():
    with pytest.raises(ValueError, match="raw_rewards: reward 3 is nan; all must be finite"):
        compute_group_normalized_rewards(torch.tensor([1.0, 0.5, 0.0, math.nan]), 4)
    with pytest.raises(ValueError, match=r"raw_rewards: got .*; accepted is a .*tensor"):
        compute_group_normalized_rewards([1.0, None, 0.0, math.nan], 4)


@pytest.mark.parametrize("cuts", [1, 3, 8])
def test_b12_advantages_stay_with_their_rows(cuts, tiny_gpt2, tokenizer):
    """The reward is the parity of the row; rows of equal reward (a group that is pruned) stand between."""
    rows = make_rows([0, 1, 0, 1, 1, 1, 1, 1, 0, 1, 0, 1], [5, 1, 7, 3, 4, 1, 6, 2, 2, 2, 8, 1])
    rows = [(prompt, response, float(reward)) for prompt, response, reward in rows]
    model = tiny_gpt2()
    expected, _ = unsplit(model, tokenizer, rows)
    by_length = sorted(range(4), key=lambda i: len(rows[i][1]))
    orders = ([*range(8, 12), *range(4), *range(4, 8)], [*by_length, 5, 7, 4, 6, 11, 8, 10, 9], list(range(12)))
    for order in orders:
        found, _, metadata = change(model, tokenizer, [rows[i] for i in order], cuts=cuts)
        same(found, expected)
        assert metadata["pruned_rows"] == 4
    scrambled = [(p, r, rows[i - 1][2]) for i, (p, r, _) in enumerate(rows)]
    assert (change(model, tokenizer, scrambled)[0] - expected).norm() > 0.01


@pytest.mark.parametrize("name", ESTIMATORS)
def test_b14_an_empty_response_adds_nothing_and_breaks_no_metric(name, tiny_gpt2, tokenizer):
    """Policy: by sequence it still counts as one of the B responses, so that it does not move the others' weight."""
    batch = tokenize_prompt_and_output(["a", "a"], ["", "b c"], tokenizer)
    assert batch["response_mask"].tolist() == [[False, False], [True, True]]
    model, rows = tiny_gpt2(), [("a", "", 0.5), ("a", "b c", 1.0)]
    arguments = ESTIMATORS[name].step_arguments() | {"normalization_constant": 8.0}
    arguments["old_log_probs"] = score_batch(model, batch["input_ids"], batch["labels"], 2)
    found, loss, metadata = change(model, tokenizer, rows, 2, cuts=2, **arguments)
    numbers = [metadata[key] for key in metadata if key not in ("rewards", "format_rewards")]
    assert all(math.isfinite(number) for number in [loss, *numbers]) and found.isfinite().all()
    # Alone, with the advantage that it has beside the other.
    advantages, _ = compute_group_normalized_rewards(
        torch.tensor([0.5, 1.0]), 2, arguments["baseline"], 1e-6, arguments["advantage_normalizer"]
    )
    arguments |= {"baseline": "none", "advantage_normalizer": "none"}
    arguments["old_log_probs"] = arguments["old_log_probs"][1:]
    alone, _, _ = change(model, tokenizer, [("a", "b c", advantages[1].item())], 1, **arguments)
    same(found, alone / 2 if arguments["loss_normalization"] == "sequence" else alone)
    assert alone.norm() > 0.01


@pytest.mark.parametrize("name", ESTIMATORS)
def test_b14_a_batch_of_empty_responses_moves_no_weight(name, tiny_gpt2, tokenizer):
    """Neither do momentum and weight decay: nothing was learned."""
    model = tiny_gpt2(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    step(model, tokenizer, EIGHT, optimizer=optimizer)
    before = weights(model)
    arguments = ESTIMATORS[name].step_arguments() | {"normalization_constant": 8.0}
    arguments["old_log_probs"] = torch.zeros(2, 1)
    loss, metadata = step(model, tokenizer, [("a b", "", 0.5), ("a b", "", 1.0)], 2, optimizer=optimizer, **arguments)
    assert torch.equal(weights(model), before)
    assert (loss, metadata["grad_norm"], metadata["skipped_update"]) == (0, 0.0, 0.0)
    assert metadata["token_entropy"] is None and metadata["mean_response_length"] == 0


@pytest.mark.parametrize("method", ["none", *RATIO_METHODS])
def test_b14_a_fully_masked_row_is_finite_in_every_kernel(method):
    policy, old = ratios([[1.1, 0.9], [1.2, 1.0]])
    mask = torch.tensor([[False, False], [True, True]])
    loss, metadata = compute_policy_gradient_loss(torch.tensor([1.0, 1.0]), policy, method, old, 0.2, mask)
    for aggregation in AGGREGATIONS:
        value = aggregate_loss_across_microbatch(loss, mask, **aggregation)
        (gradient,) = torch.autograd.grad(value, policy, retain_graph=True)
        assert value.isfinite() and gradient.isfinite().all() and not gradient[0].any() and gradient[1].all()
    assert metadata["clip_fraction"].isfinite()
    assert masked_mean(torch.full((2, 2), math.nan), torch.zeros(2, 2)) == 0
    assert set(engine_mismatch(policy, old, torch.zeros(2, 2)).values()) == {None}


def test_b15_a_batch_that_is_pruned_altogether_is_a_step_without_an_update(tiny_gpt2, tokenizer):
    model = tiny_gpt2(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    step(model, tokenizer, EIGHT, optimizer=optimizer)  # momentum, which would move the weights by itself
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    _, metadata = step(model, tokenizer, [(p, r, 1.0) for p, r, _ in EIGHT], optimizer=optimizer)
    assert torch.equal(weights(model), before)
    assert metadata["pruned_fraction"] == 1.0 and metadata["grad_norm"] == 0.0
    for was, now in zip(state["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(torch.as_tensor(was[name]), torch.as_tensor(now[name])) for name in was)


def test_b17_one_loser_keeps_its_whole_group(tiny_gpt2, tokenizer):
    rewards = torch.tensor([0.0] + [0.95] * 7)
    advantages, _ = compute_group_normalized_rewards(rewards, 8)
    assert advantages[0] < 0 < advantages[1:].min()
    _, _, metadata = change(tiny_gpt2(), tokenizer, make_rows(rewards.tolist(), [2] * 8, 8), 8)
    assert metadata["pruned_rows"] == 0 and metadata["signal_fraction"] == 1.0


def test_b42_a_loss_of_zero_has_a_gradient(tiny_gpt2, tokenizer):
    """At ratio 1 the mean of -A w over responses is minus the mean advantage, which is 0."""
    rows = make_rows([1.0, 0.0, 0.0, 1.0], [2, 5, 1, 4])
    batch = tokenize_prompt_and_output([row[0] for row in rows], [row[1] for row in rows], tokenizer)
    old = score_batch(tiny_gpt2(), batch["input_ids"], batch["labels"], 4)
    for method in ("noclip", "grpo"):
        settings = {"importance_reweighting_method": method, "old_log_probs": old, "cliprange": 0.2}
        _, loss, metadata = change(tiny_gpt2(), tokenizer, rows, **settings)
        assert abs(loss) < 1e-6 and metadata["grad_norm"] > 0.01


def test_b54_the_spread_within_groups_has_a_name_of_its_own():
    rewards = torch.tensor([1.0] * 4 + [0.0] * 4)
    _, metadata = compute_group_normalized_rewards(rewards, 4)
    assert metadata["reward_std_batch"] == pytest.approx(0.5345, abs=1e-4)
    assert metadata["reward_std_within_groups"] == 0
    assert 1 - signal_fraction(rewards, 4) == 1.0  # the share of groups without spread


# --- tokens and masks ------------------------------------------------------------------------------------------------


def test_b18_an_id_that_is_both_pad_and_eos_counts_where_it_was_sampled(tiny_gpt2):
    batch = pad_prompts_and_outputs([[5, 6], [5, 6]], [[7, 0], [7, 8, 9, 0]], pad_id=0)
    assert batch["labels"].tolist() == [[6, 7, 0, 0, 0], [6, 7, 8, 9, 0]]
    assert batch["response_mask"].int().tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    # A prompt's own 0 is read like any other token: short rows score as they do alone.
    model = tiny_gpt2()
    rows = [([0, 5, 0], [7, 0]), ([5], [8, 9, 0, 4, 4]), ([6, 0], [0, 0, 7])]
    together = pad_prompts_and_outputs(*zip(*rows, strict=True), pad_id=0)
    scores = score_batch(model, together["input_ids"], together["labels"], 3, 1.0, together["response_mask"])
    found = [row[mask].tolist() for row, mask in zip(scores, together["response_mask"], strict=True)]
    for (prompt, output), of_row in zip(rows, found, strict=True):
        logits = model(torch.tensor([prompt + output])).logits[0].log_softmax(-1)
        expected = [logits[len(prompt) - 1 + t, token].item() for t, token in enumerate(output)]
        assert of_row == pytest.approx(expected, abs=1e-10)


def test_b18_the_engine_reads_a_pad_in_the_prompt(tiny_gpt2, tokenizer, largest_difference):
    sampling = Sampling(n=4, max_tokens=8)
    rollouts = TorchEngine(tiny_gpt2(torch.float32), tokenizer).generate(["a <pad> b", "<pad>"], sampling)
    assert [rollout.prompt_token_ids for rollout in rollouts] == [[3, 0, 4], [0]]
    assert largest_difference(tiny_gpt2(torch.float32), rollouts) < 1e-5


def merging_tokenizer(**options):
    """Knows the signs of "answer is 42 hello" and the merge of 4 and 2."""
    signs = ["<pad>", "<bos>", *sorted(set("answer is 42 hello"))]
    tokenizer = Tokenizer(BPE({sign: i for i, sign in enumerate([*signs, "42"])}, [("4", "2")]))
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", **options)


def test_b20_no_token_is_merged_across_the_border():
    tokenizer = merging_tokenizer()
    prompt, output = "answer is 4", "2 hello"
    own = encode(tokenizer, prompt), encode(tokenizer, output)
    assert len(encode(tokenizer, prompt + output)) < len(own[0]) + len(own[1])
    batch = tokenize_prompt_and_output([prompt], [output], tokenizer)
    assert [*batch["input_ids"][0].tolist(), batch["labels"][0, -1].item()] == own[0] + own[1]
    assert batch["labels"][batch["response_mask"]].tolist() == own[1]
    assert encode_prompts(tokenizer, [prompt], 8, 64) == [own[0]]  # as the engines read it


@pytest.mark.parametrize("bos", ["<bos>", None])
def test_b21_no_bos_comes_between_prompt_and_response(bos):
    """Policy: none anywhere, unless the prompt's own text begins with it."""
    tokenizer = merging_tokenizer(bos_token=bos)
    assert tokenizer("4")["input_ids"][0] == 1  # it does add one when nobody objects
    batch = tokenize_prompt_and_output(["answer is 4"], ["2 hello"], tokenizer)
    assert 1 not in batch["input_ids"] and 1 not in batch["labels"]
    if bos is not None:
        batch = tokenize_prompt_and_output(["<bos>answer is 4"], ["2 hello"], tokenizer)
        assert (batch["input_ids"] == 1).nonzero().tolist() == [[0, 0]]


# --- log-probs and entropy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_b24_a_row_scores_alone_as_it_does_in_a_batch(dtype, tolerance, tiny_gpt2):
    """To 1e-5 nats in float32.  In bfloat16 to 0.05: its 8 bits round logits of size 4 to 1/64, and another batch may
    be summed in another order.  That is no drift: within a clip range of 0.2 no token counts as clipped."""
    model = tiny_gpt2(dtype)
    rows = [([3, 4], [5, 6, 7]), ([3], [8]), ([4, 4, 4, 5], [9, 9]), ([6], [3, 4, 5, 6, 7, 8, 9])]
    batch = pad_prompts_and_outputs(*zip(*rows, strict=True), pad_id=0)
    together = get_response_log_probs(model, batch["input_ids"], batch["labels"])["log_probs"]
    assert together.dtype == torch.float32  # the log-softmax is not in half precision
    for i, row in enumerate(rows):
        one = pad_prompts_and_outputs([row[0]], [row[1]], pad_id=0)
        alone = get_response_log_probs(model, one["input_ids"], one["labels"])["log_probs"]
        own, mask = together[i : i + 1, : alone.shape[1]], one["response_mask"]
        same(alone[mask], own[mask], atol=tolerance)
        for method, cliprange in (("grpo", 0.2), ("gspo", 3e-4 if dtype == torch.float32 else 0.05)):
            _, metadata = compute_policy_gradient_loss(-torch.ones(1), alone, method, own, cliprange, mask)
            assert metadata["clip_fraction"] == 0


@pytest.mark.parametrize(("temperature", "log_prob"), [(0.5, -0.0206), (1.0, -0.1698)])
def test_b25_log_probs_and_entropy_are_those_at_the_sampling_temperature(temperature, log_prob):
    logits = torch.tensor([[2.0, 0.0, -1.0]])
    p = (logits / temperature).softmax(dim=-1)
    of_table = log_probs_from_logits(logits, torch.tensor([0]), True, temperature=temperature)
    in_chunks = log_probs_and_entropy(torch.zeros(1, 2), torch.zeros(3, 2), logits[0], torch.tensor([0]), temperature)
    for found, entropy in (of_table.values(), in_chunks):
        assert found.item() == pytest.approx(log_prob, abs=1e-4)
        assert entropy.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-6)


@pytest.mark.parametrize(
    ("logits", "entropy"),
    [([0.0, -math.inf], 0.0), ([0.0, 0.0, -math.inf], 0.6931), ([65504.0, -65504.0], 0.0)],
)
def test_b28_a_token_of_probability_0_adds_no_entropy(logits, entropy):
    """The entropy is logged and has no gradient; that of the log-probs stays finite."""
    table = torch.tensor([logits], dtype=torch.float16 if 65504.0 in logits else torch.float32, requires_grad=True)
    bias = torch.tensor(logits, requires_grad=True)
    hidden, weight = torch.zeros(1, 2, requires_grad=True), torch.zeros(len(logits), 2, requires_grad=True)
    label = torch.tensor([0])
    ways = [
        (log_probs_from_logits(table, label, True).values(), [table]),
        (log_probs_and_entropy(hidden, weight, bias, label), [hidden, weight, bias]),
    ]
    for (log_probs, found), inputs in ways:
        assert found.item() == pytest.approx(entropy, abs=1e-4) and not found.requires_grad
        log_probs.sum().backward()
        assert all(tensor.grad.isfinite().all() for tensor in inputs)


@pytest.mark.parametrize("training", [True, False])
def test_b40_dropout_is_off_wherever_the_policy_is_scored(training, tiny_gpt2, tokenizer):
    model, seen = tiny_gpt2(torch.float32, dropout=0.1).train(training), []

    def spy(advantages, policy_log_probs, old_log_probs, cliprange, mask):
        seen.append(importance_ratio(policy_log_probs, old_log_probs, mask).detach())
        return token_clip(advantages, policy_log_probs, old_log_probs, cliprange, mask)

    rollouts = TorchEngine(model, tokenizer).generate(["a b c", "d"], Sampling(n=4, max_tokens=8))
    rows = [(r.prompt_token_ids, c.token_ids) for r in rollouts for c in r.completions]
    batch = pad_prompts_and_outputs(*zip(*rows, strict=True), pad_id=0)
    old = score_batch(model, batch["input_ids"], batch["labels"], 2)
    assert model.training is training
    settings = {"importance_reweighting_method": spy, "old_log_probs": old, "cliprange": 1e-5}
    _, metadata = step(model, tokenizer, EIGHT, cuts=3, rollout_token_ids=rows, **settings)
    for ratio in seen:
        same(ratio, torch.ones_like(ratio))
    assert metadata["clip_fraction"] == 0 and metadata["grad_norm"] > 0
    assert all(module.training is training for module in model.modules())


# --- ratios and clipping ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", RATIO_METHODS)
def test_b30_models_that_drifted_apart_give_a_finite_gradient(method):
    """The exponent is bounded, not its result.  There is no penalty on the KL divergence in this package; the ratio of
    two policies is the exponential that it has."""
    policy, old = torch.tensor([[-200.0], [-0.1]], requires_grad=True), torch.tensor([[-0.1], [-200.0]])
    for advantage in (1.0, -1.0):
        advantages = torch.full((2,), advantage)
        loss, _ = compute_policy_gradient_loss(advantages, policy, method, old, 0.2, torch.ones(2, 1))
        (gradient,) = torch.autograd.grad(loss.sum(), policy)
        assert loss.isfinite().all() and gradient.isfinite().all()
    near = torch.tensor([[-0.1001]])
    same(importance_ratio(near, torch.tensor([[-0.1]]), torch.ones(1, 1).bool()), torch.tensor([[math.exp(-1e-4)]]))


def test_b31_the_ratio_of_a_sequence_is_by_its_length_and_bounded():
    long, old, mask = torch.full((1, 2000), -0.95), torch.full((1, 2000), -1.0), torch.ones(1, 2000)
    loss, _ = compute_policy_gradient_loss(torch.tensor([1.0]), long, "gspo", old, 0.2, mask)
    same(-loss, torch.full((1, 2000), 1.0513), atol=1e-4)
    far = torch.tensor([[119.0, 120.0, 121.0]], requires_grad=True)
    loss, _ = compute_policy_gradient_loss(torch.tensor([-1.0]), far, "gspo", torch.zeros(1, 3), 0.2, torch.ones(1, 3))
    (gradient,) = torch.autograd.grad(loss.sum(), far)
    assert gradient.isfinite().all()
    same(loss / math.exp(MAX_LOG_RATIO), torch.ones(1, 3), atol=1e-5)


def test_b32_only_the_tokens_of_the_response_make_its_ratio():
    policy, old = torch.tensor([[-0.5, -1.5, 8.0]], requires_grad=True), torch.full((1, 3), -1.0)
    mask, advantage = torch.tensor([[1, 1, 0]]), torch.tensor([1.0])
    loss, metadata = compute_policy_gradient_loss(advantage, policy, "gspo", old, 0.2, mask)
    same(loss[:, :2], torch.tensor([[-1.0, -1.0]]))
    assert metadata["clip_fraction"] == 0
    (gradient,) = torch.autograd.grad(aggregate_loss_across_microbatch(loss, mask), policy)
    assert gradient[0, 0] == gradient[0, 1] != 0 and gradient[0, 2] == 0
    _, by_token = compute_policy_gradient_loss(advantage, policy, "grpo", old, 0.2, mask)
    assert by_token["clip_fraction"] == 0.5


@pytest.mark.parametrize(("advantage", "clipped"), [(1.0, 2), (-1.0, 0)])
def test_b34_a_token_is_clipped_where_it_has_no_gradient(advantage, clipped):
    policy, old = ratios([[0.7, 1.0, 1.5]])
    loss, metadata = compute_policy_gradient_loss(torch.tensor([advantage]), policy, "grpo", old, 0.2)
    assert metadata["clip_fraction"].item() == pytest.approx(1 / 3)
    (gradient,) = torch.autograd.grad(loss.sum(), policy)
    assert [i for i, value in enumerate(gradient[0].tolist()) if value == 0] == [clipped]


@pytest.mark.parametrize("method", RATIO_METHODS)
def test_b35_no_metric_counts_padding(method):
    found = []
    for width in (4, 64):
        policy, old = ratios([[0.7, 1.0, 1.5, *[1.5] * (width - 3)]])
        mask = torch.zeros(1, width)
        mask[:, :3] = 1
        entropy = torch.full((1, width), 7.0)
        entropy[:, :3] = torch.tensor([0.1, 0.2, 0.6])
        _, metadata = compute_policy_gradient_loss(torch.tensor([1.0]), policy, method, old, 0.2, mask)
        ratio = importance_ratio(policy, old, torch.ones_like(mask).bool())
        means = [masked_mean(values, mask).item() for values in (entropy, ratio)]
        found.append([metadata["clip_fraction"].item(), *means, engine_mismatch(policy, old, mask)])
    assert found[0] == found[1]
    assert found[0][:3] == pytest.approx([1 / 3 if method in ("grpo", "cispo") else 0, 0.3, 3.2 / 3])


@pytest.mark.parametrize("cuts", [1, 3])
def test_b35_nor_do_those_of_a_step(cuts, tiny_gpt2, tokenizer):
    """Rows of 1 to 7 words; the one of 20 has the mean reward, and is left out."""
    model, rows = tiny_gpt2(), make_rows([1.0, 0.0, 1.0, 0.5, 0.0, 0.5], [3, 1, 7, 20, 4, 4], 6)
    _, _, metadata = change(model, tokenizer, rows, 6, cuts=cuts)
    seen = [row for row in rows if row[2] != 0.5]
    batch = tokenize_prompt_and_output([row[0] for row in seen], [row[1] for row in seen], tokenizer)
    scores = get_response_log_probs(model, batch["input_ids"], batch["labels"], True)
    expected = scores["token_entropy"][batch["response_mask"]].mean().item()
    assert metadata["token_entropy"] == pytest.approx(expected, abs=1e-10)
    assert metadata["mean_response_length"] == pytest.approx((3 + 1 + 7 + 20 + 4 + 4) / 6)


def test_b37_the_norm_that_is_logged_is_that_before_clipping(tiny_gpt2, tokenizer):
    expected, _ = unsplit(tiny_gpt2(), tokenizer, EIGHT)
    limit = expected.norm().item() / 5
    for cuts in (1, 4):
        clipped, _, metadata = change(tiny_gpt2(), tokenizer, EIGHT, cuts=cuts, max_grad_norm=limit)
        assert metadata["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-6)
        assert clipped.norm().item() == pytest.approx(limit, rel=1e-4)
    assert "`grad_norm` before clipping" in inspect.getdoc(grpo_train_step)


@pytest.mark.parametrize("limit", [0, -1, math.nan, True, "1.0"])
def test_b38_what_is_no_limit_of_a_norm_is_refused(limit, tiny_gpt2, tokenizer):
    model = tiny_gpt2()
    before = weights(model)
    with pytest.raises(ValueError, match=r"max_grad_norm: got .*accepted is a number above 0, inf, or None"):
        step(model, tokenizer, EIGHT, max_grad_norm=limit)
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("limit", [None, math.inf])
def test_b38_no_limit_clips_nothing(limit, tiny_gpt2, tokenizer):
    expected, _ = unsplit(tiny_gpt2(), tokenizer, EIGHT)
    same(change(tiny_gpt2(), tokenizer, EIGHT, max_grad_norm=limit)[0], expected)


def test_b38_true_is_no_number_anywhere(tiny_gpt2, tokenizer):
    rewards = torch.tensor([1.0, 0.0])
    with pytest.raises(ValueError, match="group_size: got True"):
        compute_group_normalized_rewards(rewards, True, "none", advantage_normalizer="none")
    with pytest.raises(ValueError, match="advantage_eps: got True"):
        Estimator("own", advantage_eps=True)
    for name in ("n", "temperature", "top_p", "max_tokens", "min_tokens", "seed"):
        with pytest.raises(ValueError, match=f"{name}: got True"):
            Sampling(**{name: True})
    for name in ("temperature", "cliprange", "normalization_constant"):
        settings = {"importance_reweighting_method": "grpo", "old_log_probs": torch.zeros(8, 1), "cliprange": 0.2}
        settings |= {"loss_normalization": "constant", "normalization_constant": 8.0, name: True}
        with pytest.raises(ValueError, match=f"{name}: got True"):
            step(tiny_gpt2(), tokenizer, EIGHT, **settings)


def test_b38_a_verdict_is_a_reward_all_the_same():
    """Policy: True and False are rewards of 1 and 0; nobody means anything else by them."""
    found, _ = compute_rollout_rewards(lambda r, t: {"reward": r == t, "format_reward": True}, ["1", "2"], ["1", "1"])
    assert found.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("method", RATIO_METHODS)
def test_b41_old_log_probs_are_needed_and_constant(method):
    policy, advantages = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True), torch.tensor([2.0])
    mask = torch.ones(1, 3)
    with pytest.raises(ValueError, match="old_log_probs: got None"):
        compute_policy_gradient_loss(advantages, policy, method, None, 0.2, mask)
    compute_policy_gradient_loss(advantages, policy, "none", None, None, mask)
    loss, _ = compute_policy_gradient_loss(advantages, policy, method, policy, 0.2, mask)
    (gradient,) = torch.autograd.grad(loss.sum(), policy)
    same(gradient, torch.full((1, 3), -2.0))
