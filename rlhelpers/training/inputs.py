"""What a run needs besides its settings: problems, a model, and room for a prompt and its response in the model."""

import json
import os.path
from functools import lru_cache
from pathlib import Path

from rlhelpers import paths
from rlhelpers.hub import revision
from rlhelpers.tasks.catalogue import check_task
from rlhelpers.training.config import RunConfig

ACCEPTED = "tiny, a folder with a model and its tokenizer, or a name on the hub"


def check_inputs(config: RunConfig) -> None:
    """Raise ValueError naming the setting with which the run could not begin, FileNotFoundError where its data must be
    fetched first.

    Nothing is made or downloaded, and no weights are read: a notebook does this in its first cell, and so a sweep
    before its first run.
    """
    check_task(config.task, config.n_train_examples, config.n_val_examples)
    check_model(config.model, config.max_tokens)


def check_model(model: str, max_tokens: int) -> None:
    """Raise ValueError where there is no such model, or its context has no room for so many tokens and a prompt.

    A folder is one of the working directory unless its path is absolute.  Of a name on the Hugging Face hub is asked
    whether it exists; where the hub cannot be reached, that is left to the loading.
    """
    context = _context(model)
    if context is not None and max_tokens >= context:
        raise ValueError(
            f"max_tokens: got {max_tokens}; accepted are fewer than the {context} tokens of the context of model "
            f"{model!r}, in which the prompt must fit too"
        )


def _context(model: str) -> int | None:
    """Tokens of the model's context, where its configuration is on this machine and says so."""
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
    """The file config.json, where it was downloaded before.  ValueError for a model that there is not."""
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
