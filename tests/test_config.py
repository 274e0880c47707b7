"""Configurations: presets, names, and errors that say what is accepted."""

import math

import pytest
from bad_input import NOT_A_NAME, Row, check_refusal, name_of

from rlhelpers.kernels.estimators import ESTIMATORS, Estimator
from rlhelpers.training.config import QUICK, RunConfig, make_config

B13 = pytest.mark.field_report("B13")


def test_the_course_preset_has_the_handouts_numbers():
    config = make_config("course")
    assert (config.model, config.task) == ("allenai/OLMo-2-0425-1B", "gsm8k")
    assert (config.n_train_examples, config.n_val_examples, config.num_rollout_steps) == (6400, 1024, 200)
    assert (config.rollout_batch_size, config.train_batch_size, config.group_size) == (256, 256, 8)
    assert (config.gradient_accumulation_steps, config.learning_rate, config.max_grad_norm) == (32, 1e-5, 1.0)
    assert (config.temperature, config.max_tokens, config.betas, config.weight_decay) == (1.0, 512, (0.9, 0.95), 0.0)


def test_none_leaves_a_setting_to_the_preset():
    assert make_config("course", learning_rate=None).learning_rate == 1e-5
    assert make_config("course", learning_rate=3e-5).learning_rate == 3e-5
    assert make_config(quick=True).num_rollout_steps == QUICK["num_rollout_steps"]
    assert make_config(quick=True, num_rollout_steps=7).num_rollout_steps == 7


def test_numbers_that_arrive_as_text_are_read():
    """papermill's -y and -r pass 1e-4 as text, its -p false and (0.9, 0.95)."""
    config = make_config(learning_rate="1e-4", num_rollout_steps="5", quick="false", betas="(0.8, 0.9)")
    assert config.learning_rate == 1e-4 and config.num_rollout_steps == 5
    assert config.experiment == "04_grpo" and config.betas == (0.8, 0.9)


# Values that no setting of a kind takes.  pydantic reads "1" and 1.0 as 1, as papermill's command line needs; None
# stands for the default.
CONFIG = {name: field.get_default() for name, field in RunConfig.model_fields.items()}
GOOD = {"make_config": (make_config, {"preset": "tiny", "quick": False, **CONFIG})}
NOT_COUNTS = ["", "x", "1.5", 1.5, 0, -1, math.nan, math.inf, [], {}, [1], True]
NOT_NUMBERS = ["", "x", 0, -1, math.nan, -math.inf, [], {}, [1], True]
NOT_FLAGS = ["", "x", 2, 1.5, math.nan, [], {}]
COUNTS = ["n_train_examples", "n_val_examples", "max_tokens", "group_size", "rollout_batch_size", "train_batch_size"]
COUNTS += ["gradient_accumulation_steps", "num_rollout_steps", "eval_every", "rollouts_every", "checkpoint_every"]
NUMBERS = ["temperature", "top_p", "learning_rate", "max_grad_norm", "kv_cache_gib"]
FLAGS = ["rollouts_ahead", "gradient_checkpointing", "resume"]
NAMES = ["prompt", "engine", "components", "estimator", "tracker", "device"]
ROWS = [
    Row("make_config", "preset", NOT_A_NAME),
    Row("make_config", "quick", ["", "x", 1, 0, math.nan, [], None]),
    *(Row("make_config", name, NOT_COUNTS) for name in COUNTS),
    *(Row("make_config", name, NOT_NUMBERS) for name in NUMBERS),
    *(Row("make_config", name, NOT_FLAGS) for name in FLAGS),
    *(Row("make_config", name, NOT_A_NAME[1:]) for name in NAMES),
    *(Row("make_config", name, [3, True, "", [], "../up", "..", "a" * 300]) for name in ("experiment", "variant")),
    *(Row("make_config", name, [3, True, "", []]) for name in ("model", "task")),
    Row("make_config", "seed", ["x", 1.5, -1, 2**63, 10**400, [], True]),
    Row("make_config", "min_tokens", ["x", 1.5, -1, 65]),
    Row("make_config", "weight_decay", ["x", -1, math.nan, math.inf, []]),
    Row("make_config", "betas", ["x", 3, math.nan], "betas: got "),
    Row("make_config", "betas", [(0.9, 1.0), (0.9, -1), (0.9, math.nan), (0.9, "x"), (0.9, False)], "betas.1: got "),
    Row("make_config", "train_batch_size", [48], "_batch_size: got 128; it must be a multiple of train_batch_size=48"),
]
HAVE_NO_ROW = {"engine_gpu", "sleep_level"}  # of vLLM: see the table below


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(row):
    check_refusal(GOOD, row)


def test_every_setting_has_a_row():
    assert set(RunConfig.model_fields) - {row.argument for row in ROWS} == HAVE_NO_ROW


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": -1}, "learning_rate: got -1; input should be greater than 0"),
        ({"learning_rate": "fast"}, "learning_rate: got 'fast'; .*valid number"),
        ({"learning_rate": 1e10}, "learning_rate: got 10000000000.0"),
        ({"temperature": 1e-300}, "temperature: got 1e-300"),
        ({"top_p": 1.1}, "top_p: got 1.1"),
        ({"seed": True}, "seed: got True; accepted is a number"),
        ({"quick": "no"}, "quick: got 'no'; accepted are True and False"),
        ({"estimator": "gpro"}, "estimator: got 'gpro'; .*grpo, grpo_constant"),
        ({"estimator": Estimator("grpo", baseline="none")}, "estimator: .*'grpo' belongs to another row"),
        ({"estimator": {"name": "grpo", "baseline": "none"}}, "estimator: got .*accepted are grpo"),
        ({"estimator": Estimator("")}, "estimator: got .*accepted as its name is a text that is not empty"),
        ({"prompt": "r1"}, "prompt: got 'r1'; .*r1_zero.*question_only"),
        ({"tracker": "mlflow"}, "tracker: got 'mlflow'; .*wandb"),
        ({"engine": "vlm"}, "engine: got 'vlm'; .*'torch', 'vllm' or 'vllm-server'"),
        ({"learning_rat": 1}, "learning_rat: there is no such setting; did you mean learning_rate"),
        ({"top_k": 20}, "top_k: there is no such setting"),
        ({"group_size": 1}, "group_size: got 1; it must be at least 2 for this estimator"),
        ({"group_size": 1, "estimator": Estimator("own", baseline="none")}, "group_size: got 1"),
        ({"train_batch_size": 100}, "train_batch_size: got 100; it must be a multiple of group_size=8"),
        pytest.param({"train_batch_size": 17}, "train_batch_size: got 17; it must be a multiple", marks=B13),
        ({"rollout_batch_size": 192}, "rollout_batch_size: got 192; it must be a multiple of train_batch_size=128"),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps: got 3; it must be a divisor of"),
        ({"n_train_examples": 10}, "n_train_examples: got 10; it must be at least .* = 16"),
        pytest.param(
            {"n_train_examples": 3, "rollout_batch_size": 32, "train_batch_size": 32},
            "n_train_examples: got 3; it must be at least .* 4",
            marks=B13,
        ),
        ({"min_tokens": 65}, "min_tokens: got 65; it must be at most max_tokens=64"),
        ({"weight_decay": 1e4}, "weight_decay: got 10000.0; it must be below 1 / learning_rate = 3333.33"),
        ({"gradient_checkpointing": True, "components": "mine"}, "gradient_checkpointing: got True; it must be False"),
        ({"kv_cache_gib": 2}, "kv_cache_gib: got 2.0; it must be left at 1.0 for the engine torch"),
        ({"kv_cache_gib": 0, "engine": "vllm"}, "kv_cache_gib: got 0"),
        ({"engine_gpu": 1}, 'engine_gpu: got 1; it must be None unless engine is "vllm-server"'),
        ({"engine_gpu": 0, "engine": "vllm"}, "engine_gpu: got 0; it must be None"),
        ({"engine_gpu": -1, "engine": "vllm-server"}, "engine_gpu: got -1"),
        ({"sleep_level": 1}, 'sleep_level: got 1; it must be 0 unless engine is "vllm"'),
        ({"sleep_level": 1, "engine": "vllm-server"}, "sleep_level: got 1; it must be 0"),
        ({"sleep_level": 3, "engine": "vllm"}, "sleep_level: got 3"),
        ({"rollouts_ahead": True}, 'rollouts_ahead: got True; it must be False unless engine is "vllm-server"'),
        ({"rollouts_ahead": True, "engine": "vllm"}, "rollouts_ahead: got True; it must be False"),
        ({"temperature": 0.7, "top_p": 0.9, "engine": "vllm"}, "temperature: got 0.7; it must be 1 for a vLLM engine"),
        ({"temperature": 0.7, "min_tokens": 1, "engine": "vllm-server"}, "temperature: got 0.7; it must be 1 for"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_accepted(settings, message):
    with pytest.raises(ValueError, match=message):
        make_config(**settings)


@pytest.mark.field_report("B38")
@pytest.mark.parametrize("value", [0, -1, math.nan, True])
def test_what_is_no_limit_of_a_norm(value):
    """Policy: numbers may arrive as text, as papermill's -r and -y pass them, so "1.0" is one here; None is the
    preset's."""
    with pytest.raises(ValueError, match=f"max_grad_norm: got {value}"):
        make_config(max_grad_norm=value)
    assert make_config(max_grad_norm="1.0").max_grad_norm == make_config(max_grad_norm=None).max_grad_norm == 1.0
    assert make_config(max_grad_norm=math.inf).max_grad_norm == make_config(max_grad_norm="inf").max_grad_norm


@pytest.mark.field_report("B38")
@pytest.mark.parametrize("name", ["seed", "learning_rate", "temperature", "group_size", "num_rollout_steps", "top_p"])
def test_true_is_no_number_of_any_setting(name):
    with pytest.raises(ValueError, match=f"{name}: got True; accepted is a number"):
        make_config(**{name: True})
    with pytest.raises(ValueError, match=r"betas.*: got .*False.*; accepted is a number"):
        make_config(betas=(False, 0.9))
    assert make_config(gradient_checkpointing=True, resume="true").resume


def test_every_wrong_setting_is_named_at_once():
    with pytest.raises(ValueError) as error:
        make_config(learning_rate=-1, seed="x", promt="r1_zero")
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == ["seed", "learning_rate", "promt"]


def test_an_unknown_preset():
    with pytest.raises(ValueError, match="preset: got 'small'; accepted are tiny, cpu-vllm, course"):
        make_config("small")


def test_the_variant_names_what_differs_from_the_preset():
    assert make_config().variant == "grpo"
    assert make_config(estimator="rft", learning_rate=1e-4).variant == "rft,learning_rate=0.0001"
    assert make_config(task="gym/chain_sum").variant == "grpo,task=gym-chain_sum"
    assert make_config(variant="mine").variant == "mine"
    assert make_config(seed=3, device="cpu").variant == "grpo"


def test_a_row_of_ones_own():
    def halved(rewards):
        return rewards.mean(dim=1, keepdim=True) / 2

    config = make_config(estimator=Estimator("mine", baseline=halved))
    assert config.estimator.baseline is halved and config.variant == "mine"
    assert config.model_dump(mode="json")["estimator"]["baseline"].endswith("halved")


def test_a_variant_has_the_order_of_earlier_folders():
    settings = {"learning_rate": 1e-3, "gradient_accumulation_steps": 1, "train_batch_size": 8, "eval_every": 2}
    settings |= {"n_val_examples": 16, "prompt": "question_only", "num_rollout_steps": 5, "max_tokens": 32}
    assert make_config(**settings).variant == (
        "grpo,prompt=question_only,n_val_examples=16,max_tokens=32,train_batch_size=8,gradient_accumulation_steps=1,"
        "num_rollout_steps=5,learning_rate=0.001,eval_every=2"
    )
    assert set(RunConfig.NAMED_FIRST) < set(RunConfig.model_fields)


def test_no_two_settings_share_a_folder():
    assert make_config("course").variant == "grpo,course"
    tasks = [make_config(task=f"/{'long/' * 60}{end}").variant for end in "ab"]
    assert len(set(tasks)) == 2 and all(len(name) <= 200 for name in tasks)


def test_derived_numbers():
    config = make_config(train_batch_size=32, max_tokens=50)
    assert config.prompts_per_step == 16 and config.updates_per_step == 4
    assert config.microbatch_size == 8 and config.normalization_constant == 1600


def test_every_row_of_the_table_is_accepted():
    assert [make_config(estimator=name).estimator for name in ESTIMATORS] == list(ESTIMATORS.values())


def test_a_configuration_does_not_change():
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().seed = 3


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "vllm-server", "engine_gpu": 0},
        {"engine": "vllm", "sleep_level": 2},
        {"engine": "vllm-server", "rollouts_ahead": True},
        {"engine": "vllm-server", "rollouts_ahead": True, "estimator": "cispo"},
        {"engine": "vllm-server", "estimator": Estimator("tis", engine_ratio_cap=2.0)},
        {"engine": "torch", "temperature": 0.7, "top_p": 0.9, "min_tokens": 1},
        {"engine": "vllm", "temperature": 0.7},
        {"engine": "vllm", "top_p": 0.9, "min_tokens": 1},
    ],
)
def test_what_goes_together_is_accepted(settings):
    config = make_config(**settings)
    assert all(getattr(config, name) == value for name, value in settings.items() if name != "estimator")


@pytest.mark.parametrize(
    ("preset", "engine"),
    [
        ("tiny", "torch"),
        ("cpu-vllm", "vllm"),
        ("course", "torch"),
        ("single-gpu", "vllm"),
        ("two-gpu", "vllm-server"),
    ],
)
def test_every_preset_names_its_engine_and_has_a_quick_run(preset, engine):
    assert make_config(preset).engine == make_config(preset, quick=True).engine == engine
    assert make_config(preset).variant == ("grpo" if preset == "tiny" else f"grpo,{preset}")


def test_the_presets_of_one_size_train_in_the_same_way():
    """Where it runs and what samples is all that they differ in."""
    where = {"engine", "kv_cache_gib", "sleep_level", "gradient_accumulation_steps", "variant"}
    for presets in (["tiny", "cpu-vllm"], ["course", "single-gpu", "two-gpu"]):
        first, *others = (make_config(preset).model_dump(exclude=where) for preset in presets)
        assert all(other == first for other in others)
    assert make_config("single-gpu").sleep_level == 1


def test_a_row_with_later_cells_is_recorded_with_them():
    row = Estimator(
        "mine", importance_reweighting_method="grpo", cliprange=(0.2, 0.28), kl_coefficient=0.1, prunes=False
    )
    recorded = make_config(estimator=row).model_dump(mode="json")["estimator"]
    assert (recorded["cliprange"], recorded["kl_coefficient"], recorded["prunes"]) == ([0.2, 0.28], 0.1, False)
    assert Estimator(**recorded) == row
    assert "kl_coefficient" not in make_config().model_dump(mode="json")["estimator"]
    assert make_config(estimator=row).fingerprint != make_config(estimator="offpolicy_clip").fingerprint


def test_a_step_of_the_readers_own_knows_no_penalty():
    row = Estimator("mine", kl_coefficient=0.1, prunes=False)
    with pytest.raises(
        ValueError, match='components: got mine; it must be "package" for an estimator with a KL penalty'
    ):
        make_config(estimator=row, components="mine")
