"""Everything that decides a run, checked before any work starts."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhelpers.checks import check_one_of
from rlhelpers.kernels.estimators import ESTIMATORS
from rlhelpers.tasks.prompts import PROMPTS
from rlhelpers.training.fingerprint import fingerprint
from rlhelpers.training.settings import (
    Betas,
    Count,
    Device,
    EstimatorRow,
    Name,
    Real,
    Seed,
    Switch,
    Text,
    Whole,
    checked,
    describe,
    read_switch,
)


class RunConfig(BaseModel):
    """One run.  The defaults are the preset `tiny`.  Both batch sizes count responses, as the handout does."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)

    experiment: Name = Field("04_grpo", description="first folder under data/runs")
    variant: Name | None = Field(
        None, description="second folder; None: the estimator and what differs from the preset"
    )
    seed: Seed = 0
    model: Text = Field("tiny", description='"tiny", a Hugging Face name, or a directory')
    device: Device = Field("auto", description="auto: cuda where there is one")

    task: Text = Field("tiny", description='"tiny", "gsm8k", "gym/<name>", or a folder of JSONL files')
    prompt: Literal[tuple(PROMPTS)] = "r1_zero"
    n_train_examples: Count = 6400
    n_val_examples: Count = 512

    engine: Literal["torch", "vllm", "vllm-server"] = Field(
        "torch", description="what samples: this process, vLLM on the policy's device, or a vLLM server"
    )
    engine_gpu: Whole | None = Field(
        None, ge=0, lt=1024, description="the server's GPU; None: the one after the policy's"
    )
    kv_cache_gib: Real = Field(1.0, gt=0, le=1024, description="memory that vLLM takes for keys and values, in GiB")
    sleep_level: Whole = Field(
        0,
        ge=0,
        le=2,
        description="vLLM on the policy's GPU gives back memory while training: 1 keeps its weights on the CPU",
    )
    rollouts_ahead: Switch = Field(False, description="sample the next batch while training on this one")

    temperature: Real = Field(1.0, ge=0.01, le=100)
    top_p: Real = Field(1.0, gt=0, le=1)
    max_tokens: Count = 64
    min_tokens: Whole = Field(0, ge=0)

    estimator: EstimatorRow = ESTIMATORS["grpo"]
    components: Literal["package", "mine"] = Field("package", description="mine: the train step saved by notebook 03")
    group_size: Count = 8
    rollout_batch_size: Count = 128
    train_batch_size: Count = 128
    gradient_accumulation_steps: Count = 4
    gradient_checkpointing: Switch = Field(
        False, description="keep the inputs of layers only and compute the rest again: less memory, a slower update"
    )
    num_rollout_steps: Count = 50
    learning_rate: Real = Field(3e-4, gt=0, le=1)
    max_grad_norm: Real = Field(1.0, gt=0, allow_inf_nan=True, description="inf: no clipping")
    betas: Betas = (0.9, 0.95)
    weight_decay: Real = Field(0.0, ge=0)

    eval_every: Count = 5
    rollouts_every: Count = 10
    checkpoint_every: Count = Field(5, description="steps between checkpoints, from which a killed run can go on")
    resume: Switch = Field(
        False, description="go on with an unfinished run of this configuration from its last checkpoint"
    )
    tracker: Literal["wandb", "trackio"] | None = None

    @model_validator(mode="after")
    def _numbers_fit_together(self) -> Self:
        server = self.engine == "vllm-server"
        group, train, steps = self.group_size, self.train_batch_size, self.gradient_accumulation_steps
        rules = [
            ("group_size", group > 1 or not self.estimator.needs_a_group, "at least 2 for this estimator"),
            ("train_batch_size", train % group == 0, f"a multiple of group_size={group}"),
            ("rollout_batch_size", self.rollout_batch_size % train == 0, f"a multiple of train_batch_size={train}"),
            ("gradient_accumulation_steps", train % steps == 0, f"a divisor of train_batch_size={train}"),
            (
                "n_train_examples",
                self.prompts_per_step <= self.n_train_examples,
                f"at least rollout_batch_size / group_size = {self.prompts_per_step}",
            ),
            (
                "components",
                self.components == "package" or not any(map(callable, vars(self.estimator).values())),
                '"package" for an estimator whose cells are functions',
            ),
            (
                "gradient_checkpointing",
                not self.gradient_checkpointing or self.components == "package",
                'False unless components is "package": a step of your own decides that itself',
            ),
            ("engine_gpu", self.engine_gpu is None or server, 'None unless engine is "vllm-server"'),
            ("kv_cache_gib", self.engine != "torch" or self.kv_cache_gib == 1, "left at 1.0 for the engine torch"),
            ("sleep_level", self.sleep_level == 0 or self.engine == "vllm", '0 unless engine is "vllm"'),
            ("rollouts_ahead", not self.rollouts_ahead or server, 'False unless engine is "vllm-server"'),
            (
                "temperature",
                # vLLM's log-probs are those before temperature, top_p and min_tokens, or those after all three.
                self.engine == "torch" or self.temperature == 1 or (self.top_p == 1 and self.min_tokens == 0),
                "1 for a vLLM engine, unless top_p=1 and min_tokens=0: its log-probs would not be comparable",
            ),
            ("min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens={self.max_tokens}"),
            (
                "weight_decay",  # AdamW takes the product off every weight, at every update
                self.weight_decay * self.learning_rate < 1,
                f"below 1 / learning_rate = {1 / self.learning_rate:g}",
            ),
        ]
        problems = [f"{name}: got {getattr(self, name)}; it must be {what}" for name, fine, what in rules if not fine]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def fingerprint(self) -> str:
        """The same for the same numbers, wherever the run lies; see training/fingerprint."""
        return fingerprint(self)

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
    """A checked configuration: the preset, then QUICK where asked for, then the settings that are not None.

    Raises ValueError with one line for each wrong setting: its name, the value, what is accepted; for an unknown
    name, the nearest known ones.
    """
    check_one_of(PRESETS, preset=preset)
    try:
        is_quick = read_switch(quick)
    except ValueError as error:
        raise ValueError(f"quick: got {quick!r}; {error}") from None
    given = {name: value for name, value in settings.items() if value is not None}
    base = PRESETS[preset] | (QUICK if is_quick else {})
    config = checked(RunConfig, base | given, ["preset", "quick"])
    if config.variant is None:
        first = [config.estimator.name, *([preset] if preset != "tiny" else [])]
        config = config.model_copy(update={"variant": describe(config, RunConfig(**base), first, {"estimator"})})
    return config
