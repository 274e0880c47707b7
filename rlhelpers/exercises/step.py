"""Exercise of notebook 03: one step of training, with all that can go wrong in it."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from rlhelpers import kernels
from rlhelpers.exercises.advantages import word_reward
from rlhelpers.exercises.exercise import Exercise
from rlhelpers.exercises.tokens import small_policy, tiny_tokenizer
from rlhelpers.kernels.logprobs import score_batch
from rlhelpers.training.own_step import NEEDED

ROLLOUTS = [("1+1=", " 2", "2"), ("1+1=", " 3 or 4", "2"), ("2+3=", " 5", "5"), ("2+3=", " 6", "5")]
SILENT = [("1+2=", " 3", "3"), ("1+2=", " 3", "3")]


def _step(rollouts: list = ROLLOUTS, microbatches: int = 1, **settings) -> dict:
    inputs = {"gradient_accumulation_steps": microbatches, "max_grad_norm": None, "rollouts": rollouts, "group_size": 2}
    return inputs | settings


CONSTANT = {"loss_normalization": "constant", "normalization_constant": 16.0}


def _cut_steps(**settings) -> list[dict]:
    uneven = _step(SILENT + ROLLOUTS, microbatches=2, **settings)  # 3 rows and 1, once the silent ones are left out
    return [_step(microbatches=2, **settings), _step(microbatches=4, **settings), uneven]


SAMPLED_IDS = [([5, 6], [7, 8]), ([5, 6], [9]), ([10], [11, 12]), ([10], [13])]


def _weights_after(function: Callable, inputs: dict) -> dict[str, Tensor | float]:
    """One step of SGD from the same weights, where a stale gradient lies about.

    The update, as two numbers for each of the two ends of the model; the loss; the metadata that the loop reads.
    """
    policy, tokenizer = copy.deepcopy(small_policy()), tiny_tokenizer()
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    settings = dict(inputs)
    prompts, responses, truths = (list(column) for column in zip(*settings.pop("rollouts"), strict=True))
    if settings.get("importance_reweighting_method", "none") != "none":
        settings["old_log_probs"] = _slightly_older(policy, tokenizer, prompts, responses)
    for weight in policy.parameters():
        weight.grad = torch.ones_like(weight)
    loss, metadata = function(
        model=policy,
        tokenizer=tokenizer,
        optimizer=torch.optim.SGD(policy.parameters(), lr=1.0, weight_decay=settings.pop("weight_decay", 0.0)),
        reward_fn=word_reward,
        repeated_prompts=prompts,
        rollout_responses=responses,
        repeated_ground_truths=truths,
        **settings,
    )
    sums = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        d = policy.get_parameter(name).detach() - before[name]
        sums[f"change of {name}"] = torch.stack([d.norm(), (d * torch.arange(d.numel()).reshape(d.shape)).mean()])
    return {"loss": loss, **{name: metadata[name] for name in NEEDED}} | sums


def _slightly_older(policy, tokenizer, prompts, responses) -> Tensor:
    """Log-probs of a policy that is not quite the present one: some ratios leave the clip range."""
    tensors = kernels.tokenize_prompt_and_output(prompts, responses, tokenizer)
    scores = score_batch(policy, tensors["input_ids"], tensors["labels"], len(prompts))
    return scores + 0.3 * torch.sin(torch.arange(scores.numel()).reshape(scores.shape).float())


def _scaled_step(normalization: str, scale: Callable[[int], float]) -> Callable:
    """A wrong step: under one normalization its gradient is `scale`(number of microbatches) times the right one."""

    def step(*, gradient_accumulation_steps, **arguments):
        factor = 1.0
        if arguments.get("loss_normalization", "sequence") == normalization:
            factor = scale(gradient_accumulation_steps)
        for group in arguments["optimizer"].param_groups:
            group["lr"] *= factor
        loss, metadata = kernels.grpo_train_step(gradient_accumulation_steps=gradient_accumulation_steps, **arguments)
        return loss * factor, metadata | {"grad_norm": metadata["grad_norm"] * factor}

    return step


def _stepping_for_nothing(*, model, optimizer, **arguments):
    loss, metadata = kernels.grpo_train_step(model=model, optimizer=optimizer, **arguments)
    if metadata["pruned_fraction"] == 1:
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
    return loss, metadata


def _with_stale_gradient(*, model, optimizer, **arguments):
    loss, metadata = kernels.grpo_train_step(model=model, optimizer=optimizer, **arguments)
    with torch.no_grad():
        for weight in model.parameters():
            weight -= optimizer.param_groups[0]["lr"] * torch.ones_like(weight)
    return loss, metadata


grpo_train_step = Exercise(
    "grpo_train_step",
    kernels.grpo_train_step,
    {
        "one step of the optimizer down the gradient of the batch's loss": [_step(ROLLOUTS[:2]), _step()],
        "sequence: the update does not depend on the cut into microbatches": _cut_steps(),
        "constant: nor does it here": _cut_steps(**CONSTANT),
        "rows without an advantage change nothing, also where there are no others": [
            _step(SILENT, weight_decay=0.5),
            _step(SILENT + ROLLOUTS, microbatches=3),
        ],
        "the gradient's norm is clipped once, and reported as it was before": [
            _step(max_grad_norm=0.01),
            _step(max_grad_norm=0.01, microbatches=4),
        ],
        "eps, Dr. GRPO, RFT and MaxRL": [
            _step(advantage_eps=0.5),
            _step(advantage_normalizer="none", **CONSTANT),
            _step(baseline="none", advantage_normalizer="none", **CONSTANT),
            _step(advantage_normalizer="mean", **CONSTANT),
        ],
        "off-policy: noclip, grpo, gspo, cispo": [
            _step(importance_reweighting_method="noclip"),
            _step(importance_reweighting_method="grpo", cliprange=0.2, microbatches=2),
            _step(importance_reweighting_method="gspo", cliprange=3e-2, microbatches=4),
            _step(importance_reweighting_method="cispo", cliprange=0.1),
        ],
        "temperature divides the logits": [_step(temperature=2.0)],
        "token ids that were sampled are what is scored": [_step(rollout_token_ids=SAMPLED_IDS)],
    },
    {
        "adding up the microbatches' means without their share of the batch": _scaled_step("sequence", lambda n: n),
        "scaling by the share of the batch, which a constant has in it already": _scaled_step(
            "constant", lambda n: 1 / n
        ),
        "a gradient left over from before": _with_stale_gradient,
        "a step of the optimizer where there is no gradient, which decays the weights": _stepping_for_nothing,
        "ignoring the temperature": lambda **given: kernels.grpo_train_step(**given | {"temperature": 1.0}),
        "encoding the text again": lambda **given: kernels.grpo_train_step(**given | {"rollout_token_ids": None}),
    },
    _weights_after,
)
