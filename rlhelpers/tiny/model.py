"""Make the embedded base model: problems, tokenizer, pretraining, and its scores.

    data/tiny/   train.jsonl validation.jsonl   tokenizer files   config.json model.safetensors   recipe.json

recipe.json holds the settings below, the versions, a checksum of every other file, and the measured scores.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm.auto import tqdm

from rlhelpers import paths
from rlhelpers.files import sha256
from rlhelpers.rollouts import Sampling, TorchEngine
from rlhelpers.tasks import Problem
from rlhelpers.tasks.grading import Grader
from rlhelpers.tasks.gsm8k import jsonl_text, read_problems
from rlhelpers.tasks.prompts import PROMPTS
from rlhelpers.tiny.corpus import draw_document
from rlhelpers.tiny.problems import draw_problems
from rlhelpers.training.evaluation import evaluate

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import Olmo2ForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"


@dataclass(frozen=True)
class Recipe:
    """The settings behind data/tiny.  `phases` are (steps, window in tokens)."""

    seed: int = 0
    train_problems: int = 6400
    validation_problems: int = 1024
    tokenizer_documents: int = 4000
    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 4
    heads: int = 4
    context: int = 2048
    tokens_per_step: int = 8192
    # Short windows are cheap; the long ones at the end teach the model to use a prompt with examples.
    phases: tuple[tuple[int, int], ...] = ((800, 256), (160, 512))
    muon_learning_rate: float = 0.02
    adamw_learning_rate: float = 3e-3
    warmup_steps: int = 50
    scored_problems: int = 512


def make_tiny(folder: Path | None = None, recipe: Recipe = Recipe()) -> None:
    """Write all files to `folder` (data/tiny); about a quarter of an hour on two cores."""
    folder = Path(folder or paths.TINY)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    write_problems(folder, recipe)
    tokenizer = train_tokenizer(recipe)
    tokenizer.save_pretrained(folder)
    model = build_model(recipe, tokenizer)
    pretrain(model, tokenizer, recipe)
    model.save_pretrained(folder)
    scores = score(model, tokenizer, read_problems(folder / "validation.jsonl")[: recipe.scored_problems])
    record = {
        "recipe": asdict(recipe),
        "parameters": model.num_parameters(),
        "versions": {package: version(package) for package in ("torch", "transformers", "tokenizers")},
        "minutes": round((time.perf_counter() - started) / 60, 1),
        "scores": scores,
        "sha256": checksums(folder),
    }
    (folder / "recipe.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write_problems(folder: Path, recipe: Recipe) -> None:
    """Write train.jsonl and validation.jsonl in GSM8K's format.  No content of one occurs in the other."""
    rng = random.Random(f"{recipe.seed}/problems")
    for name, count in (("train", recipe.train_problems), ("validation", recipe.validation_problems)):
        problems = draw_problems(rng, count, validation=name == "validation")
        rng.shuffle(problems)
        (folder / f"{name}.jsonl").write_text(jsonl_text(p.gsm8k_row() for p in problems), encoding="utf-8")


def train_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the corpus.  Every digit is a token of its own."""
    from transformers import PreTrainedTokenizerFast

    documents = list(itertools.islice(draw_documents(f"{recipe.seed}/tokenizer"), recipe.tokenizer_documents))
    words_digits_signs_space = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
    split = pre_tokenizers.Split(words_digits_signs_space, behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        model_max_length=recipe.context,
        clean_up_tokenization_spaces=False,
    )


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Olmo2ForCausalLM:
    """Build the model with weights drawn by the recipe's seed."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    config = Olmo2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=recipe.context,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(recipe.seed)
    return Olmo2ForCausalLM(config)


def pretrain(model: Olmo2ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
    """Train on next-token prediction; every document is read once."""
    optimizers = make_optimizers(model, recipe)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    total, smoothed = sum(steps for steps, _ in recipe.phases), None
    bar = tqdm(token_batches(tokenizer, recipe), total=total, desc="pretraining", mininterval=5)
    for step, (inputs, labels) in enumerate(bar):
        # Linear warm-up, constant, linear decay over the second half.
        factor = min(1.0, (step + 1) / recipe.warmup_steps, 2 * (total - step) / total)
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = peak * factor
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        smoothed = loss.item() if smoothed is None else 0.95 * smoothed + 0.05 * loss.item()
        bar.set_postfix(loss=f"{smoothed:.3f}", refresh=False)


def make_optimizers(model: Olmo2ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, AdamW for embeddings, head and norms."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and ".layers." in name else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=recipe.muon_learning_rate, weight_decay=0.1),
        torch.optim.AdamW(others, lr=recipe.adamw_learning_rate, betas=(0.9, 0.95)),
    ]


def token_batches(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, labels), each (rows, window) int64: packed documents, an end-of-text token after each."""
    documents = draw_documents(f"{recipe.seed}/pretraining")
    tokens: list[int] = []
    for steps, window in recipe.phases:
        for _ in range(steps):
            while len(tokens) <= recipe.tokens_per_step:
                texts = list(itertools.islice(documents, 64))
                for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
                    tokens += [*ids, tokenizer.eos_token_id]
            block = torch.tensor(tokens[: recipe.tokens_per_step + 1])
            tokens = tokens[recipe.tokens_per_step :]
            yield block[:-1].view(-1, window), block[1:].view(-1, window)


def draw_documents(seed: str) -> Iterator[str]:
    """Yield documents without end."""
    rng = random.Random(seed)
    while True:
        yield draw_document(rng)


def score(model: Olmo2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> dict[str, Any]:
    """Return format and accuracy at each prompt, measured on one response to each problem at temperature 1."""
    engine, scores = TorchEngine(model, tokenizer), {}
    for name, prompt in PROMPTS.items():
        sampling = Sampling(max_tokens=64, stop=prompt.stop)
        metrics, _ = evaluate(engine, problems, Grader(prompt), sampling)
        scores[name] = {"format": metrics["val_format_reward"], "accuracy": metrics["val_reward"]}
    return scores


def checksums(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file of the folder but recipe.json."""
    return {
        file.name: sha256(file) for file in sorted(folder.iterdir()) if file.is_file() and file.name != "recipe.json"
    }
