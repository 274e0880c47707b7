"""The model that is trained, its tokenizer, and its optimizer."""

from __future__ import annotations

import importlib.util
import os.path
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlhelpers import paths
from rlhelpers.atomic import whole_folder
from rlhelpers.checks import check_flag, check_text
from rlhelpers.hub import revision

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlhelpers.training.config import RunConfig


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
