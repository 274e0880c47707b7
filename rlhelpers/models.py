"""Names on the Hugging Face hub.  The workbook's own model is one commit of its repository, whose hash is a checksum of
its files: whatever is uploaded later is not loaded.

Dropout off for a while, also where gradients are checkpointed.

What is asked of a model before anything is read once for several rows: whether they can share keys and values, how
many, and how the model is given them.

The model that is trained, its tokenizer, and its optimizer."""

from __future__ import annotations

import importlib.util
import inspect
import os.path
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module

from rlhelpers import paths
from rlhelpers.checks import check_flag, check_text
from rlhelpers.files import whole_folder

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlhelpers.training.config import RunConfig


REVISIONS = {"allenai/OLMo-2-0425-1B": "a1847dff35000b4271fa70afc5db10fd29fedbdf"}


def revision(model: str) -> str:
    """What a name stands for: its commit in REVISIONS, and else what is newest."""
    return REVISIONS.get(model, "main")


def download_command(model: str) -> str:
    """What a shell is told to fetch it beforehand."""
    return f"hf download {model} --revision {revision(model)}"


@contextmanager
def eval_mode(model: Module) -> Iterator[None]:
    """Everything in eval mode inside; afterwards each submodule is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def checkpointing_in_eval_mode(model: Module | Callable) -> Iterator[None]:
    """Forward passes inside keep the gradient checkpoints that the model was told to keep, also in eval mode, in which
    transformers would keep everything.

    It decides by the `training` of a layer that is called.  So the layer says that it is in training until it begins
    to compute, and everything in it is in eval mode, as it is when the backward pass computes it again.
    """
    modules = model.modules() if isinstance(model, Module) else ()  # a function that gives logits has none
    layers = [m for m in modules if getattr(m, "gradient_checkpointing", False) and not m.training]
    hooks = [layer.register_forward_pre_hook(_begin_in_eval_mode) for layer in layers]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, hook in zip(layers, hooks, strict=True):
            layer.training = False
            hook.remove()


def _begin_in_eval_mode(layer: Module, _) -> None:
    layer.training = False


WORTH_A_PASS = 256  # tokens: one more forward pass, with its way back, takes about as long as these
_HEAD_IS_LINEAR: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def can_share(model: PreTrainedModel) -> bool:
    """Whether keys and values can be handed on, which they cannot with sliding windows, and logits are a linear map of
    the last hidden state."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
    return plain and head_is_linear(model)


def head_is_linear(model: PreTrainedModel) -> bool:
    """Whether logits are a linear map of the last hidden state: not where they are scaled or soft-capped."""
    if model not in _HEAD_IS_LINEAR:
        _HEAD_IS_LINEAR[model] = _head_is_linear(model)
    return _HEAD_IS_LINEAR[model]


@torch.no_grad()
def _head_is_linear(model: PreTrainedModel) -> bool:
    """By trial, on a few tokens: models have names of their own for what else they do with logits.  The same operation
    on the same numbers gives the same bits."""
    with eval_mode(model):
        tokens = torch.arange(min(8, model.config.vocab_size), device=model.device)[None]
        logits = model(input_ids=tokens, use_cache=False).logits
        head = model.get_output_embeddings()
        linear = head(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
    return torch.equal(logits, linear)


def common_beginning(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with; 0 where to read them once saves less than a pass costs."""
    first, last = min(prompts), max(prompts)  # in the order of a dictionary: what these two share, all share
    different = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    common = next(different, len(first))
    return common if common * (len(prompts) - 1) >= WORTH_A_PASS else 0


def cache_argument(model: PreTrainedModel) -> str:
    """transformers 5.24 calls the argument `cache`, 5.19 `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def load_policy(
    model: str, device: str = "auto", gradient_checkpointing: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load "tiny", a Hugging Face name, or a directory.  safetensors only; no code from the model's repository; of
    OLMo-2-0425-1B the commit in hub.REVISIONS.

    On CUDA: bf16 weights, as the handout has it, and no float32 copies of them (an update far below a weight's own size
    is rounded away; a run says for how many, see `cautions`), with flash-attention 2 where it is installed and torch's
    own attention where it is not.
    On the CPU: float32.  `gradient_checkpointing`: the backward pass keeps each layer's input and computes the rest
    again.  Raises ValueError when CUDA is asked for and absent, the model cannot be found, or it cannot checkpoint.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    check_text(model=model)
    check_flag(gradient_checkpointing=gradient_checkpointing)
    device = choose_device(device)
    logging.disable_progress_bar()  # bars of a fraction of a second, which fill the logs of a run
    source = str(paths.TINY) if model == "tiny" else model
    if Path(source).is_absolute() and not os.path.isdir(source):
        raise ValueError(f"model: got {model!r}; no such directory")
    on_gpu = device.startswith("cuda")
    attention = "flash_attention_2" if on_gpu and importlib.util.find_spec("flash_attn") else "sdpa"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision(source), trust_remote_code=False)
        policy, loading = AutoModelForCausalLM.from_pretrained(
            source,
            revision=revision(source),
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # each kind of broken folder has its own kind of error
        raise ValueError(
            f"model: got {model!r}; accepted are tiny, a directory with a model and its tokenizer, or a name on the "
            f"Hugging Face hub that this machine can reach ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error
    if loading["missing_keys"]:
        raise ValueError(f"model: got {model!r}, which lacks the weights {sorted(loading['missing_keys'])[:3]} ...")
    if gradient_checkpointing:
        if not policy.supports_gradient_checkpointing:
            raise ValueError(f"gradient_checkpointing: got True; {type(policy).__name__} has none, accepted is False")
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy.to(device), tokenizer


def make_optimizer(policy: PreTrainedModel, config: RunConfig) -> torch.optim.AdamW:
    """AdamW, on CUDA in one kernel, which needs no copies of the weights' size and rounds once, at the end."""
    return torch.optim.AdamW(
        policy.parameters(),
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=policy.device.type == "cuda",
    )


def save_policy(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a folder that load_policy reads.  It is there whole or not at all; an earlier one goes."""
    with whole_folder(folder) as new:
        policy.save_pretrained(new)
        tokenizer.save_pretrained(new)


def choose_device(device: str) -> str:
    """ "auto" is cuda where there is one, and else cpu.  Raises ValueError for what is none of auto, cpu and cuda."""
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ValueError(f"device: got {device!r}; accepted are auto, cpu, cuda and cuda:<number>")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device: got {device!r}; this machine has no CUDA device, accepted are auto and cpu")
    return device
