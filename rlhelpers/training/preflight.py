"""Checks before the first step: that problems and model exist and fit each other, and what a reader of the results must
know of settings that are accepted."""

import json
import os.path
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

from rlhelpers import paths
from rlhelpers.models import revision
from rlhelpers.tasks.task import check_task
from rlhelpers.training.config import RunConfig

ACCEPTED = "tiny, a folder with a model and its tokenizer, or a name on the hub"


def check_inputs(config: RunConfig) -> None:
    """Raise ValueError naming the setting with which the run could not begin, FileNotFoundError where its data must be
    fetched first.  Makes and downloads nothing and reads no weights: notebooks do this in their first cell."""
    check_task(config.task, config.n_train_examples, config.n_val_examples)
    check_model(config.model, config.max_tokens)


def check_model(model: str, max_tokens: int) -> None:
    """Raise ValueError where there is no such model, or its context has no room for `max_tokens` and a prompt.

    A relative path is one of the working directory.  Where the Hugging Face hub cannot be reached, whether it has the
    model is left to the loading.
    """
    context = _context(model)
    if context is not None and max_tokens >= context:
        raise ValueError(
            f"max_tokens: got {max_tokens}; accepted are fewer than the {context} tokens of the context of model "
            f"{model!r}, in which the prompt must fit too"
        )


def _context(model: str) -> int | None:
    """Return the tokens of the model's context; None where no configuration on this machine says so."""
    source = str(paths.TINY) if model == "tiny" else model
    if os.path.isdir(source):
        file = Path(source, "config.json")
        if not file.is_file() or not any(Path(source).glob("*.safetensors")):
            raise ValueError(f"model: got {model!r}; {Path(source).absolute()} has no config.json or no *.safetensors")
    elif os.path.isabs(source):
        raise ValueError(f"model: got {model!r}; no such directory")
    elif (found := _of_the_hub(source)) is None:
        return None
    else:
        file = Path(found)
    try:
        context = json.loads(file.read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"model: got {model!r}; {file} cannot be read, {type(error).__name__}: {error}") from error
    return context if isinstance(context, int) else None


@lru_cache  # a sweep asks for each of its runs
def _of_the_hub(name: str) -> str | None:
    """Return config.json, where it was downloaded before.  Raises ValueError for a model that does not exist."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    here = f"there is no folder {Path(name).absolute()}"[:300]
    try:
        if isinstance(file := try_to_load_from_cache(name, "config.json", revision=revision(name)), str):
            return file
        if not constants.HF_HUB_OFFLINE:
            HfApi().model_info(name, timeout=10)
            return None
        where = "in the hub's cache, and HF_HUB_OFFLINE forbids more"
    except (HFValidationError, RepositoryNotFoundError):
        where = "on the Hugging Face hub"
    except Exception:  # no network, or a hub out of order: every version of its library has other errors for that
        return None
    raise ValueError(f"model: got {name[:200]!r}; {here}, and no such model {where}; accepted is {ACCEPTED}")


FEW = 0.01  # of the weights


def cautions(config: RunConfig, policy: torch.nn.Module) -> Iterator[str]:
    """Yield a sentence for each thing that a reader of the results must know before the first step.

    Sampling leaves tokens out and the method has ratios of probabilities.  Or weights in half precision, which have no
    float32 copies, are not moved by an update.
    """
    row = config.estimator
    # Ratios are of the whole distributions of trainer and engine; the policy that acted was another.
    if row.importance_reweighting_method != "none" or row.engine_ratio_cap is not None:
        for name, whole in (("top_p", 1), ("min_tokens", 0)):
            if (value := getattr(config, name)) != whole:
                yield (
                    f"{name}={value} keeps tokens from being sampled that the ratios of {row.name} count as possible: "
                    f"its weights are not exactly those of the policy that acted, as they are with {name}={whole}."
                )
    if (share := unmoved_share(policy, config.learning_rate)) > FEW:
        yield (
            f"{share:.0%} of the weights are too large for their precision, {policy.dtype}, to be moved by one update "
            f"of the size of learning_rate={config.learning_rate:g}; a larger learning rate moves more of them."
        )


@torch.no_grad()
def unmoved_share(policy: torch.nn.Module, size: float) -> float:
    """Return the share of weights that rounding in their dtype keeps as they are when `size` is added or subtracted.

    AdamW moves a weight by about the learning rate at most.  bfloat16 has 8 bits, so that is lost where the weight is
    above some 256 to 512 times as large, and at every step again.
    """
    unmoved = sum(int(((w + size == w) & (w - size == w)).sum()) for w in policy.parameters())
    return unmoved / max(1, sum(w.numel() for w in policy.parameters()))
