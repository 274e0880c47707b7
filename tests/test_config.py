"""Configurations: presets, names, and errors that say what is accepted."""

import pytest

from rlhelpers.kernels.estimators import ESTIMATORS, Estimator
from rlhelpers.training.config import QUICK, RunConfig, make_config


def test_the_course_preset_has_the_handouts_numbers():
    config = make_config("course")
    assert (config.model, config.task) == ("allenai/OLMo-2-0425-1B", "gsm8k")
    assert (config.n_train_examples, config.n_val_examples, config.num_rollout_steps) == (6400, 1024, 200)
    assert (config.rollout_batch_size, config.train_batch_size, config.group_size) == (256, 256, 8)
    assert (config.gradient_accumulation_steps, config.learning_rate, config.max_grad_norm) == (32, 1e-5, 1.0)
    assert (config.temperature, config.max_tokens, config.betas, config.weight_decay) == (1.0, 512, (0.9, 0.95), 0.0)


def test_none_leaves_a_setting_to_the_preset_and_a_value_overrides_it():
    assert make_config("course", learning_rate=None).learning_rate == 1e-5
    assert make_config("course", learning_rate=3e-5).learning_rate == 3e-5
    assert make_config(quick=True).num_rollout_steps == QUICK["num_rollout_steps"]
    assert make_config(quick=True, num_rollout_steps=7).num_rollout_steps == 7


def test_numbers_that_arrive_as_text_are_read():
    """papermill's -y and -r pass 1e-4 as text, its -p false and (0.9, 0.95)."""
    config = make_config(learning_rate="1e-4", num_rollout_steps="5", quick="false", betas="(0.8, 0.9)")
    assert config.learning_rate == 1e-4 and config.num_rollout_steps == 5
    assert config.experiment == "04_grpo" and config.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": -1}, "learning_rate: got -1; input should be greater than 0"),
        ({"learning_rate": "fast"}, "learning_rate: got 'fast'; .*valid number"),
        ({"learning_rate": float("nan")}, "learning_rate: got nan"),
        ({"max_grad_norm": 0}, "max_grad_norm: got 0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm: got nan"),
        ({"quick": "no"}, "quick: got 'no'; accepted are True and False"),
        ({"experiment": ".."}, "experiment: got '..'"),
        ({"estimator": Estimator("grpo", baseline="none")}, "estimator: .*'grpo' belongs to another row"),
        ({"group_size": 1, "estimator": Estimator("own", baseline="none")}, "group_size: got 1"),
        ({"temperature": 0}, "temperature: got 0"),
        ({"temperature": 1e-300}, "temperature: got 1e-300"),
        ({"learning_rate": 1e10}, "learning_rate: got 10000000000.0"),
        ({"seed": 10**400}, "seed: got 1000"),
        ({"estimator": {"name": "grpo", "baseline": "none"}}, "estimator: got .*accepted are grpo"),
        ({"top_p": 1.1}, "top_p: got 1.1"),
        ({"seed": -1}, "seed: got -1"),
        ({"kv_cache_gib": 2}, "kv_cache_gib: got 2.0; it must be left at 1.0 for the engine torch"),
        ({"estimator": Estimator("")}, "estimator: got .*accepted as its name is a text that is not empty"),
        ({"num_rollout_steps": 2.5}, "num_rollout_steps: got 2.5"),
        ({"prompt": "r1"}, "prompt: got 'r1'; .*r1_zero.*question_only"),
        ({"estimator": "gpro"}, "estimator: got 'gpro'; .*grpo, grpo_constant"),
        ({"device": "gpu"}, "device: got 'gpu'"),
        ({"tracker": "mlflow"}, "tracker: got 'mlflow'; .*wandb"),
        ({"experiment": "../up"}, "experiment: got '../up'"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"learning_rat": 1}, "learning_rat: there is no such setting; did you mean learning_rate"),
        ({"train_batch_size": 100}, "train_batch_size: got 100; it must be a multiple of group_size=8"),
        ({"rollout_batch_size": 192}, "rollout_batch_size: got 192; it must be a multiple of train_batch_size=128"),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps: got 3; it must be a divisor of"),
        ({"n_train_examples": 10}, "n_train_examples: got 10; it must be at least .* = 16"),
        ({"group_size": 1}, "group_size: got 1; it must be at least 2"),
        ({"min_tokens": 65}, "min_tokens: got 65; it must be at most max_tokens=64"),
        ({"engine": "vlm"}, "engine: got 'vlm'; .*'torch', 'vllm' or 'vllm-server'"),
        ({"gradient_checkpointing": True, "components": "mine"}, "gradient_checkpointing: got True; it must be False"),
        ({"engine_gpu": 1}, 'engine_gpu: got 1; it must be None unless engine is "vllm-server"'),
        ({"engine_gpu": 0, "engine": "vllm"}, "engine_gpu: got 0; it must be None"),
        ({"engine_gpu": -1, "engine": "vllm-server"}, "engine_gpu: got -1"),
        ({"kv_cache_gib": 0, "engine": "vllm"}, "kv_cache_gib: got 0"),
        ({"sleep_level": 1}, 'sleep_level: got 1; it must be 0 unless engine is "vllm"'),
        ({"sleep_level": 1, "engine": "vllm-server"}, "sleep_level: got 1; it must be 0"),
        ({"sleep_level": 3, "engine": "vllm"}, "sleep_level: got 3"),
        ({"rollouts_ahead": True}, 'rollouts_ahead: got True; it must be False unless engine is "vllm-server"'),
        ({"rollouts_ahead": True, "engine": "vllm"}, "rollouts_ahead: got True; it must be False"),
        ({"temperature": 0.7, "top_p": 0.9, "engine": "vllm"}, "temperature: got 0.7; it must be 1 for a vLLM engine"),
        ({"temperature": 0.7, "min_tokens": 1, "engine": "vllm-server"}, "temperature: got 0.7; it must be 1 for"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_accepted(settings, message):
    with pytest.raises(ValueError, match=message):
        make_config(**settings)


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


def test_no_two_settings_share_a_folder():
    assert make_config("course").variant == "grpo,course"
    tasks = [make_config(task=f"/{'long/' * 60}{end}").variant for end in "ab"]
    assert len(set(tasks)) == 2 and all(len(name) <= 200 for name in tasks)


def test_clipping_can_be_turned_off():
    assert make_config(max_grad_norm=float("inf")).max_grad_norm == float("inf")


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
