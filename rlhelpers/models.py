"""Models of transformers: loading and saving them, eval mode, and whether rows can share their keys and values."""

from __future__ import annotations

import importlib.util
import inspect
import os.path
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module

from rlhelpers import paths
from rlhelpers.checks import check_flag, check_text
from rlhelpers.files import whole_folder

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The course's model is one commit of its repository: a later upload is not loaded.
REVISIONS = {"allenai/OLMo-2-0425-1B": "a1847dff35000b4271fa70afc5db10fd29fedbdf"}


def revision(model: str) -> str:
    """The commit of a model on the Hugging Face hub: the one in REVISIONS, else the newest."""
    return REVISIONS.get(model, "main")


def download_command(model: str) -> str:
    """The shell command that fetches a model from the hub beforehand."""
    return f"hf download {model} --revision {revision(model)}"


@contextmanager
def eval_mode(model: Module) -> Iterator[None]:
    """Put all submodules in eval mode inside the block, and each back in its own mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def checkpointing_in_eval_mode(model: Module | Callable) -> Iterator[None]:
    """Keep gradient checkpointing on in eval mode, in forward passes inside the block.

    transformers checkpoints a layer only where its `training` is True at the call.  So the layer is in training until
    it begins to compute; everything in it is in eval mode, then and when the backward pass computes it again.
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
    """Can rows with a common prefix share this model's KV cache?  Not with sliding windows, and not where logits are no
    linear map of the last hidden state."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
    return plain and head_is_linear(model)


def head_is_linear(model: PreTrainedModel) -> bool:
    """Are logits a linear map of the last hidden state?  Not where they are scaled or soft-capped."""
    if model not in _HEAD_IS_LINEAR:
        _HEAD_IS_LINEAR[model] = _head_is_linear(model)
    return _HEAD_IS_LINEAR[model]


@torch.no_grad()
def _head_is_linear(model: PreTrainedModel) -> bool:
    """Try it on a few tokens, since each model has its own names for what else it does with logits.  The same operation
    on the same numbers gives the same bits."""
    with eval_mode(model):
        tokens = torch.arange(min(8, model.config.vocab_size), device=model.device)[None]
        logits = model(input_ids=tokens, use_cache=False).logits
        head = model.get_output_embeddings()
        linear = head(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
    return torch.equal(logits, linear)


def common_beginning(prompts: Sequence[Sequence[int]]) -> int:
    """The number of tokens that all prompts begin with; 0 where sharing them saves less than one more pass costs."""
    first, last = min(prompts), max(prompts)  # in lexicographic order: what these two share, all share
    different = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    common = next(different, len(first))
    return common if common * (len(prompts) - 1) >= WORTH_A_PASS else 0


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the cache argument: `cache` in transformers 5.24, `past_key_values` in 5.19."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def load_policy(
    model: str, device: str = "auto", gradient_checkpointing: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load "tiny", a Hugging Face name, or a directory.  Only safetensors are read, and no code of the model's own.

    On CUDA: bf16 weights without float32 copies, as the handout has it (an update far below a weight's size is rounded
    away; see preflight.cautions), and flash-attention 2 where it is installed, else torch's own attention.  On the CPU:
    float32.  `gradient_checkpointing`: the backward pass keeps each layer's input and computes the rest again.
    Raises ValueError when CUDA is asked for and absent, the model cannot be found, or it cannot checkpoint.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    check_text(model=model)
    check_flag(gradient_checkpointing=gradient_checkpointing)
    device = choose_device(device)
    logging.disable_progress_bar()  # its bars of a fraction of a second would fill a run's log
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


def make_optimizer(policy: PreTrainedModel, config: Any) -> torch.optim.AdamW:
    """AdamW with the configuration's `learning_rate`, `betas` and `weight_decay`.

    On CUDA it is one fused kernel, which needs no copies of the weights and rounds once, at the end."""
    return torch.optim.AdamW(
        policy.parameters(),
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=policy.device.type == "cuda",
    )


def save_policy(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a folder that load_policy reads, whole or not at all; it replaces an earlier one."""
    with whole_folder(folder) as new:
        policy.save_pretrained(new)
        tokenizer.save_pretrained(new)


def choose_device(device: str) -> str:
    """Return cuda or cpu for "auto".  Raises ValueError for a device that is unknown, or that this machine lacks."""
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ValueError(f"device: got {device!r}; accepted are auto, cpu, cuda and cuda:<number>")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device: got {device!r}; this machine has no CUDA device, accepted are auto and cpu")
    return device
