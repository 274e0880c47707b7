"""Exercises of notebook 03: from texts to tensors, and from tensors to log-probabilities."""

import copy
import functools
import math
from collections.abc import Callable

import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from rlhelpers import kernels, paths
from rlhelpers.exercises.exercise import Exercise


@functools.cache
def tiny_tokenizer():
    from transformers import AutoTokenizer  # here, because transformers takes seconds to import

    return AutoTokenizer.from_pretrained(str(paths.TINY))


@functools.cache
def adding_tokenizer():
    """The same, which adds the end-of-text token before every text unless told not to."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    first = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.eos_token_id)]
    )
    return tokenizer


def _texts(*pairs: tuple[str, str], tokenizer=None) -> dict:
    prompts, outputs = zip(*pairs, strict=True)
    return {"prompt_strs": list(prompts), "output_strs": list(outputs), "tokenizer": tokenizer or tiny_tokenizer()}


def _tokens_without_padding(function: Callable, inputs: dict) -> dict[str, Tensor]:
    """With 0 at padded positions of the ids, where any id is right."""
    got = function(**inputs)
    encode = functools.partial(inputs["tokenizer"].encode, add_special_tokens=False)
    pairs = zip(inputs["prompt_strs"], inputs["output_strs"], strict=True)
    lengths = [len(encode(p)) + len(encode(o)) for p, o in pairs]
    position = torch.arange(max(lengths) - 1)
    last = torch.tensor(lengths)[:, None] - 1
    free = {"input_ids": position > last, "labels": position >= last}
    same_shape = got["input_ids"].shape == got["labels"].shape == (len(lengths), len(position))
    return got | ({k: got[k].masked_fill(where, 0) for k, where in free.items()} if same_shape else {})


def _masked_by(change: Callable[[Tensor], Tensor]) -> Callable:
    """A wrong function: right but for its mask."""

    def tokenize(**texts):
        tensors = kernels.tokenize_prompt_and_output(**texts)
        return tensors | {"response_mask": change(tensors["response_mask"])}

    return tokenize


def _encoded_together(prompt_strs, output_strs, tokenizer):
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    rows = [(encode(p + o), len(encode(p))) for p, o in zip(prompt_strs, output_strs, strict=True)]
    return kernels.tokens.pad_prompts_and_outputs([ids[:n] for ids, n in rows], [ids[n:] for ids, n in rows], 0)


def _with_special_tokens(prompt_strs, output_strs, tokenizer):
    prompts, outputs = [tokenizer.encode(p) for p in prompt_strs], [tokenizer.encode(o) for o in output_strs]
    return kernels.tokens.pad_prompts_and_outputs(prompts, outputs, 0)


tokenize_prompt_and_output = Exercise(
    "tokenize_prompt_and_output",
    kernels.tokenize_prompt_and_output,
    {
        "labels are the inputs one token later, and the mask marks the labels of the output": lambda: [
            _texts(("2+2=", "4")),
            _texts(("User: 2+2", " 4 </answer>")),
        ],
        "short rows are filled up on the right, and padding is never response": lambda: [
            _texts(("1", "2"), ("1+1", "2")),
            _texts(("1+1=", "2"), ("2", "2 = 2"), ("What is 12?", " 12")),
        ],
        "prompt and output are encoded apart": lambda: [
            _texts(("apple", "s")),
            _texts(("The ans", "wer"), ("2+2=", "4")),
        ],
        "no special token is added": lambda: [_texts(("2+2=", "4"), tokenizer=adding_tokenizer())],
    },
    {
        "a mask aligned with input_ids instead of labels": _masked_by(
            lambda mask: torch.nn.functional.pad(mask, (1, 0))[:, :-1]
        ),
        "encoding prompt and output as one text": _encoded_together,
        "special tokens before prompt and output": _with_special_tokens,
        "marking all that follows the prompt, padding included": _masked_by(lambda mask: mask.cumsum(dim=1) > 0),
    },
    _tokens_without_padding,
)


@functools.cache
def small_policy():
    """About 30 000 random weights, always the same ones."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    config = Olmo2Config(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
        pad_token_id=tiny_tokenizer().pad_token_id,
        eos_token_id=tiny_tokenizer().eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Olmo2ForCausalLM(config).eval()


def _scored(entropy: bool, temperature: float = 1.0) -> list[dict]:
    settings = {"return_token_entropy": entropy, "temperature": temperature}
    tables = [torch.arange(rows * (n + 1)).reshape(rows, n + 1) * 7 % 800 for rows, n in ((1, 1), (1, 3), (2, 5))]
    return [{"model": small_policy(), "input_ids": ids[:, :-1], "labels": ids[:, 1:]} | settings for ids in tables]


def _scores_and_gradient(function: Callable, inputs: dict) -> dict[str, Tensor]:
    got = function(**inputs)
    (gradient,) = torch.autograd.grad(got["log_probs"].sum(), inputs["model"].lm_head.weight, retain_graph=True)
    return got | {"gradient's norm": gradient.norm()}


def _entropy_in_bits(**given):
    got = kernels.get_response_log_probs(**given | {"return_token_entropy": True})
    return got | {"token_entropy": got["token_entropy"] / math.log(2)}


def _unnormalised(model, input_ids, labels, **settings):
    logits = model(input_ids).logits
    return {"log_probs": logits.gather(-1, labels[..., None]).squeeze(-1), "token_entropy": logits.sum(-1)}


get_response_log_probs = Exercise(
    "get_response_log_probs",
    kernels.get_response_log_probs,
    {
        "log pi_theta(label | what stands before it), with its gradient": lambda: _scored(entropy=False),
        "the entropy of each next-token distribution, in nats": lambda: _scored(entropy=True),
        "temperature divides the logits": lambda: _scored(entropy=True, temperature=2.0),
    },
    {
        "scoring input_ids, the token that was just read, instead of the label": lambda **given: (
            kernels.get_response_log_probs(**given | {"labels": given["input_ids"]})
        ),
        "an entropy in bits": _entropy_in_bits,
        "ignoring the temperature": lambda **given: kernels.get_response_log_probs(**given | {"temperature": 1.0}),
        "taking the logit for the log-probability": _unnormalised,
    },
    _scores_and_gradient,
)
