"""Zero-shot evaluation: ask a model each example of a benchmark once, greedily.

An evaluation leaves a folder:
evaluation.json   which model was asked what and how, versions, seconds
responses.jsonl   a line for each example: its fields, the generation, the parsed answer, its score
outputs.json(l)   where another model judges: the file that it reads
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from rlhelpers import paths
from rlhelpers.benchmarks.tasks import Benchmark, Example, get_benchmark
from rlhelpers.files import json_lines, strict_json, whole_folder
from rlhelpers.kernels.tokens import beginning
from rlhelpers.models import load_policy
from rlhelpers.rollouts import Completion, RolloutEngine, Sampling
from rlhelpers.rollouts.engine import encode_prompts
from rlhelpers.tasks.prompts import TEMPLATES, Template
from rlhelpers.training.config import RunConfig
from rlhelpers.training.provenance import provenance
from rlhelpers.training.run_folder import free_name
from rlhelpers.training.sampler import Sampler, make_engine

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
AT_ONCE = 128  # prompts: enough to keep an engine busy, few enough to show progress


@dataclass(frozen=True)
class ZeroShotPrompt(Template):
    """A template for an instruction, and the fence that closes an answer, where the template opens one."""

    fence: str = ""

    def answer(self, generation: str) -> str:
        """Cut a generation at the stop string, the closing fence and the white space around.

        Other fences stay: an answer may hold code.
        """
        text = generation.partition(self.stop)[0] if self.stop else generation
        return text.strip().removesuffix(self.fence).rstrip()


# The supplement's system prompt, section 2, word for word: scores under another wording compare with no one's.
# It is URIAL's without its examples (arXiv:2312.01552).  The final newline is part of it: the answer begins there.
QUERY_ANSWER = ZeroShotPrompt(
    "query_answer", (TEMPLATES / "query_answer.txt").read_text(encoding="utf-8"), stop="# Query:", fence="```"
)


def evaluate_benchmark(name: str, data: Path, config: RunConfig) -> Path:
    """Ask the configuration's model all examples in `data`.  Return `data/runs/zero_shot/<benchmark>/<model>`.

    The configuration decides model, device, engine and `max_tokens`.  An earlier folder is moved aside.
    Raises ValueError or FileNotFoundError for a wrong name or wrong data before a model is loaded, and ValueError for
    an example that does not fit the model's context before any is asked.
    """
    benchmark = get_benchmark(name)
    examples = benchmark.read(data)
    folder = paths.RUNS / "zero_shot" / benchmark.name / paths.file_name(config.model)
    policy, tokenizer = load_policy(config.model, config.device)
    prompts, context = _prompts(examples, tokenizer, QUERY_ANSWER), policy.config.max_position_embeddings
    encode_prompts(tokenizer, prompts, config.max_tokens, context)  # or ValueError
    engine = make_engine(config, policy, tokenizer, folder.with_name(f"{folder.name}.engine.log"))
    sampler = Sampler(engine, policy, tokenizer, config.temperature, print)
    try:
        sampler.sync()
        rows, seconds = answer(benchmark, examples, sampler, tokenizer, config.max_tokens)
    finally:
        sampler.close()
    settings = {"engine": config.engine, "device": str(policy.device), "dtype": str(policy.dtype), "data": str(data)}
    settings |= {"prompt": vars(QUERY_ANSWER)} | provenance()
    return save(folder, benchmark, rows, config.model, seconds, settings)


def answer(
    benchmark: Benchmark,
    examples: Sequence[Example],
    engine: RolloutEngine | Sampler,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    prompt: ZeroShotPrompt = QUERY_ANSWER,
) -> tuple[list[Row], float]:
    """Ask each example once, at temperature 0.  Return a row for each, and the engine's seconds for all of them.

    A row has the example's fields, `instruction`, `ground_truth`, `generation` (what the model wrote), `output` (its
    answer), `finish_reason`, `tokens`, `prediction` (parsed from the output; None where there is none or no parser) and
    `score`: 1.0 or 0.0, 0.0 without a prediction; None where another model judges.
    """
    if not examples:
        raise ValueError("examples: got none; accepted is at least one")
    prompts = _prompts(examples, tokenizer, prompt)
    sampling = Sampling(temperature=0, max_tokens=max_tokens, stop=prompt.stop)
    started = time.perf_counter()
    rollouts = []
    for first in tqdm(range(0, len(prompts), AT_ONCE), desc=benchmark.name, unit=f"{AT_ONCE} examples", disable=None):
        rollouts += engine.generate(prompts[first : first + AT_ONCE], sampling)
    seconds = time.perf_counter() - started
    pairs = zip(examples, rollouts, strict=True)
    return [_row(benchmark, example, rollout.completions[0], prompt) for example, rollout in pairs], seconds


def _prompts(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, prompt: ZeroShotPrompt) -> list[str]:
    start = beginning(tokenizer)
    return [start + prompt(example.instruction) for example in examples]


def _row(benchmark: Benchmark, example: Example, completion: Completion, prompt: ZeroShotPrompt) -> Row:
    output = prompt.answer(completion.text)
    prediction = score = None
    if benchmark.parse is not None:
        prediction = benchmark.parse(output)
        score = float(prediction is not None and benchmark.is_right(prediction, example.ground_truth))
    return {
        **example.fields,
        "instruction": example.instruction,
        "ground_truth": example.ground_truth,
        "generation": completion.text,
        "output": output,
        "finish_reason": completion.finish_reason,
        "tokens": len(completion.token_ids),
        "prediction": prediction,
        "score": score,
    }


def save(
    folder: Path, benchmark: Benchmark, rows: Sequence[Row], model: str, seconds: float, settings: dict[str, Any]
) -> Path:
    """Write an evaluation, whole or not at all, and return its folder.  An earlier one is moved aside.

    `settings`: what else evaluation.json should say.
    """
    about = {"benchmark": benchmark.name, "metric": benchmark.metric, "model": model, "seconds": seconds} | settings
    with whole_folder(folder) as new:
        (new / "evaluation.json").write_text(strict_json(about, indent=2) + "\n", encoding="utf-8")
        (new / "responses.jsonl").write_text(json_lines(rows), encoding="utf-8")
        if benchmark.to_judge is not None:
            (new / benchmark.judge_file).write_text(benchmark.to_judge(list(rows), model), encoding="utf-8")
        if folder.exists():
            folder.rename(free_name(folder))
    return folder
