"""The configuration of an RL run: everything that decides it, checked before any work starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from rlhelpers.checks import check_one_of
from rlhelpers.kernels.estimators import ESTIMATORS
from rlhelpers.tasks.prompts import PROMPTS
from rlhelpers.training import own_step
from rlhelpers.training.fingerprint import identity
from rlhelpers.training.settings import (
    Betas,
    Count,
    EstimatorRow,
    LearningRate,
    Name,
    Real,
    RunSettings,
    Switch,
    Whole,
    make_settings,
    read_switch,
    recorded_cells,
    setting,
)


class RunConfig(RunSettings):
    """One run.  The defaults are the preset `tiny`.  Both batch sizes count responses, as the handout does."""

    NAMED_FIRST: ClassVar[tuple[str, ...]] = (
        *("model", "task", "prompt", "n_train_examples", "n_val_examples"),
        *("engine", "engine_gpu", "kv_cache_gib", "sleep_level", "rollouts_ahead"),
        *("temperature", "top_p", "max_tokens", "min_tokens"),
        *("components", "group_size", "rollout_batch_size", "train_batch_size"),
        *("gradient_accumulation_steps", "gradient_checkpointing", "num_rollout_steps"),
        *("learning_rate", "max_grad_norm", "betas", "weight_decay"),
    )

    experiment: Name = "04_grpo"

    prompt: Literal[tuple(PROMPTS)] = "r1_zero"
    n_train_examples: Count = 6400
    n_val_examples: Count = 512

    # What samples: this process, vLLM on the policy's device, or a vLLM server.
    engine: Literal["torch", "vllm", "vllm-server"] = "torch"
    # The server's GPU; None: the one after the policy's.
    engine_gpu: Whole | None = setting(None, "nothing", ge=0, lt=1024)
    kv_cache_gib: Real = setting(1.0, "rounding", gt=0, le=1024)  # memory that vLLM takes for keys and values
    # Above 0 vLLM frees GPU memory while training; 1 keeps its weights on the CPU.
    sleep_level: Whole = setting(0, "nothing", ge=0, le=2)
    rollouts_ahead: Switch = False  # sample the next batch while training on this one

    temperature: Real = Field(1.0, ge=0.01, le=100)
    top_p: Real = Field(1.0, gt=0, le=1)
    min_tokens: Whole = Field(0, ge=0)

    estimator: EstimatorRow = setting(ESTIMATORS["grpo"], "numbers", named=False)
    components: Literal["package", "mine"] = "package"  # mine: the train step saved by notebook 03
    group_size: Count = 8
    rollout_batch_size: Count = 128
    train_batch_size: Count = 128
    gradient_accumulation_steps: Count = 4
    num_rollout_steps: Count = 50
    learning_rate: LearningRate = 3e-4
    betas: Betas = (0.9, 0.95)
    weight_decay: Real = Field(0.0, ge=0)

    eval_every: Count = 5
    rollouts_every: Count = setting(10, "nothing")  # steps between those whose responses are kept
    checkpoint_every: Count = 5

    def rules(self) -> list[tuple[str, bool, str]]:
        row, torch, server = self.estimator, self.engine == "torch", self.engine == "vllm-server"
        group, train, steps = self.group_size, self.train_batch_size, self.gradient_accumulation_steps
        prompts, package = self.prompts_per_step, self.components == "package"
        enough = prompts <= self.n_train_examples
        own_functions = any(map(callable, vars(row).values()))
        own_decides = 'False unless components is "package": a step of your own decides that itself'
        # vLLM's log-probs are those before temperature, top_p and min_tokens, or those after all three.
        whole = self.top_p == 1 and self.min_tokens == 0
        comparable = "1 for a vLLM engine, unless top_p=1 and min_tokens=0: its log-probs would not be comparable"
        most = 1 / self.learning_rate  # AdamW takes weight_decay * learning_rate off every weight, at every update
        return [
            ("group_size", group > 1 or not row.needs_a_group, "at least 2 for this estimator"),
            ("train_batch_size", train % group == 0, f"a multiple of group_size={group}"),
            ("rollout_batch_size", self.rollout_batch_size % train == 0, f"a multiple of train_batch_size={train}"),
            ("gradient_accumulation_steps", train % steps == 0, f"a divisor of train_batch_size={train}"),
            ("n_train_examples", enough, f"at least rollout_batch_size / group_size = {prompts}"),
            ("components", package or not own_functions, '"package" for an estimator whose cells are functions'),
            ("components", package or not row.kl_coefficient, '"package" for an estimator with a KL penalty'),
            ("gradient_checkpointing", package or not self.gradient_checkpointing, own_decides),
            ("engine_gpu", server or self.engine_gpu is None, 'None unless engine is "vllm-server"'),
            ("kv_cache_gib", not torch or self.kv_cache_gib == 1, "left at 1.0 for the engine torch"),
            ("sleep_level", self.engine == "vllm" or self.sleep_level == 0, '0 unless engine is "vllm"'),
            ("rollouts_ahead", server or not self.rollouts_ahead, 'False unless engine is "vllm-server"'),
            ("temperature", torch or self.temperature == 1 or whole, comparable),
            ("min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens={self.max_tokens}"),
            ("weight_decay", self.weight_decay * self.learning_rate < 1, f"below 1 / learning_rate = {most:g}"),
        ]

    @property
    def method(self) -> str:
        """What a variant's name begins with."""
        return self.estimator.name

    def deciding(self) -> dict[str, Any]:
        cells = {name: identity(cell) for name, cell in recorded_cells(self.estimator).items()}
        return super().deciding() | {"estimator": cells}

    def files(self) -> Iterator[Path]:
        yield from super().files()
        if self.components == "mine" and (own := Path(own_step.FILE)).is_file():
            yield own

    @property
    def prompts_per_step(self) -> int:
        return self.rollout_batch_size // self.group_size

    @property
    def updates_per_step(self) -> int:
        """Above 1 the later updates of a rollout batch are off-policy."""
        return self.rollout_batch_size // self.train_batch_size

    @property
    def microbatch_size(self) -> int:
        return self.train_batch_size // self.gradient_accumulation_steps

    @property
    def normalization_constant(self) -> float:
        """Z of the constant loss normalization."""
        return float(self.train_batch_size * self.max_tokens)


COURSE = {
    "model": "allenai/OLMo-2-0425-1B",
    "task": "gsm8k",
    "n_val_examples": 1024,
    "max_tokens": 512,
    "rollout_batch_size": 256,
    "train_batch_size": 256,
    "gradient_accumulation_steps": 32,
    "num_rollout_steps": 200,
    "learning_rate": 1e-5,
    "eval_every": 10,
    "checkpoint_every": 10,
}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "cpu-vllm": {"engine": "vllm"},
    "course": COURSE,
    # Four rows at a time, the most that `rlhelpers doctor` sees fit on a card of 24 GB: about 19 GiB while vLLM sleeps,
    # and with eight rows 24.
    "single-gpu": COURSE | {"engine": "vllm", "kv_cache_gib": 6.0, "sleep_level": 1, "gradient_accumulation_steps": 64},
    "two-gpu": COURSE | {"engine": "vllm-server", "kv_cache_gib": 16.0},
}
# A run of seconds with the same code, for CI and for a first look.
QUICK = {
    "experiment": "quick",
    "n_train_examples": 64,
    "n_val_examples": 16,
    "max_tokens": 48,
    "rollout_batch_size": 32,
    "train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "num_rollout_steps": 2,
    "eval_every": 1,
    "rollouts_every": 1,
    "checkpoint_every": 1,
}


def make_config(preset: str = "tiny", quick: bool = False, **settings: Any) -> RunConfig:
    """Return a checked configuration: the preset, then QUICK where asked for, then the settings that are not None.

    Raises ValueError with one line for each wrong setting: its name, the value, what is accepted; for an unknown
    name, the nearest known ones.
    """
    check_one_of(PRESETS, preset=preset)
    try:
        base = PRESETS[preset] | (QUICK if read_switch(quick) else {})
    except ValueError as error:
        raise ValueError(f"quick: got {quick!r}; {error}") from None
    return make_settings(RunConfig, preset, base, settings, also=["preset", "quick"])
