"""What others have written, a model's text, a model's folder, a name, is never run, opened as a pickle, taken for HTML
or for a path; and no other machine reaches a server."""

import ast
import builtins
import json
import pickle
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import torch
from test_server_with_a_stub import launch, tokenizer_of_tiny  # noqa: F401, fixtures

import rlhelpers
from rlhelpers import cli, paths
from rlhelpers.doctor.machine import look_at_machine
from rlhelpers.kernels.estimators import Estimator
from rlhelpers.models import REVISIONS, download_command, load_policy, revision
from rlhelpers.rollouts.vllm_server import VLLMServer
from rlhelpers.rollouts.vllm_settings import launch_arguments, server_environment
from rlhelpers.tasks import get_prompt, gsm8k, load_task
from rlhelpers.tasks.gsm8k import FILES, jsonl_text
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import RunRecords
from rlhelpers.workbook import verdicts

PACKAGE = Path(rlhelpers.__file__).parent
# Code that a person has named: a notebook's own cells, and two files of python.
RUN_CODE = {
    "sweep/plan.py": ["exec"],
    "training/own_step.py": ["exec_module"],
    "bench/grader.py": ["run_path"],
}
LOADERS = {"AutoTokenizer", "AutoConfig", "AutoModelForCausalLM"}


def calls(path):
    """Of a file: what is called, as it is written, and its keyword arguments."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}


@pytest.fixture(scope="module")
def all_calls():
    return {str(path.relative_to(PACKAGE)): list(calls(path)) for path in PACKAGE.rglob("*.py")}


def test_nothing_is_evaluated_but_what_a_person_has_named(all_calls):
    """The text of a model has no way to a shell, a pickle or python; sympify is given the package's own numbers."""
    runs = re.compile(
        r"(^|\.)(exec|exec_module|run_path|run_module|popen|getoutput)$|^eval$|os\.system|pickle\.|marshal\."
    )
    found = {file: [name for name, _ in made if runs.search(name)] for file, made in all_calls.items()}
    assert {file: [n.rpartition(".")[2] for n in names] for file, names in found.items() if names} == RUN_CODE
    parsers = {file for file, made in all_calls.items() for name, _ in made if re.search(r"sympify|parse_expr", name)}
    assert parsers == {"theory/symbolic.py"}


def test_no_command_goes_through_a_shell_and_no_file_through_a_pickle(all_calls):
    made = [(name, given) for calls in all_calls.values() for name, given in calls]
    assert not [name for name, given in made if given.get("shell", "False") != "False"]
    assert {given.get("weights_only") for name, given in made if name == "torch.load"} == {"True"}
    assert not [name for name, _ in made if re.fullmatch(r"yaml\.(load|unsafe_load|full_load)", name)]


def test_every_model_is_loaded_without_its_code_and_at_its_revision(all_calls):
    """Both are given by name, or in `options`, where they stand together."""
    own = "exercises/tokens.py"  # which loads data/tiny
    for file, made in all_calls.items():
        for name, given in made:
            loader, _, method = name.rpartition(".")
            if method == "from_pretrained" and loader in LOADERS and file != own:
                assert None in given or {"trust_remote_code", "revision"} <= given.keys(), (file, name)
        source = (PACKAGE / file).read_text(encoding="utf-8")
        assert source.count("trust_remote_code") == source.count("trust_remote_code=False") + source.count(
            '"trust_remote_code": False'
        )
        for options in re.findall(r"(?:options =|return) {.*}", source):
            assert ("trust_remote_code" in options) == ("revision" in options)


# Models.


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(paths.TINY, tmp_path / "model")


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_a_model_in_a_pickle_is_refused_unopened(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    mark = tmp_path / "opened"
    torch.save({"model.embed_tokens.weight": Bomb(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model: got .*safetensors"):
        load_policy(str(folder), "cpu")
    found = look_at_machine(make_config(model=str(folder)))
    assert found.model_error == f"no *.safetensors in {folder}"
    assert not mark.exists()
    with open(folder / "pytorch_model.bin", "rb"), pytest.raises(pickle.UnpicklingError):
        torch.load(folder / "pytorch_model.bin", weights_only=True)


@pytest.mark.parametrize("load_format", ["pt", "mistral", "npcache", ""])
def test_vllm_opens_safetensors_only(load_format):
    """Its own `auto` takes pickles where a folder has no others."""
    engine = launch_arguments("a model", "float32", True, 64, "shared_memory", 1.0, 1.0, 0)
    assert engine["load_format"] == "safetensors"
    server = VLLMServer(str(paths.TINY))._arguments
    assert server["load_format"] == "safetensors" and "trust_remote_code" not in server
    with pytest.raises(ValueError, match=f"load_format: got '{load_format}'; accepted are auto, safetensors, dummy"):
        VLLMServer(str(paths.TINY), load_format=load_format)


@pytest.mark.parametrize("kind", ["olmo2", "of_its_own"])
def test_a_models_own_code_is_not_run_even_if_somebody_says_yes(folder, tmp_path, monkeypatch, kind):
    """A model of a known kind is loaded by the library's code; of another it is refused."""
    mark = tmp_path / "run"
    code = f"import pathlib; pathlib.Path({str(mark)!r}).touch()\nfrom transformers import *\n"
    code += (
        "class Config(Olmo2Config): model_type = 'of_its_own'\nclass Model(Olmo2ForCausalLM): config_class = Config\n"
    )
    (folder / "code.py").write_text(code, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": kind, "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    if kind == "olmo2":
        assert type(load_policy(str(folder), "cpu")[0]).__module__.startswith("transformers.")
        VLLMServer(str(folder))
    else:
        with pytest.raises(ValueError, match=r"model: got .*"):
            load_policy(str(folder), "cpu")
        with pytest.raises(ValueError, match=r"model_id: got .*"):
            VLLMServer(str(folder))
        assert look_at_machine(make_config(model=str(folder))).model_error
    assert not mark.exists()


def test_the_workbooks_own_model_is_one_commit_everywhere():
    """Which is the checksum of what is downloaded."""
    model = make_config("course").model
    assert re.fullmatch(r"[0-9a-f]{40}", REVISIONS[model]) and revision("other/model") == "main"
    assert download_command(model) == f"hf download {model} --revision {REVISIONS[model]}"
    given = launch_arguments(model, "bfloat16", False, 4096, "nccl", 1.0, 1.0, 0)
    assert given["revision"] == given["tokenizer_revision"] == REVISIONS[model]


def test_a_data_set_with_another_checksum_replaces_nothing(tmp_path, monkeypatch, capsys):
    """The test split is wrong, the train split is right, and both are there already."""
    datasets = pytest.importorskip("datasets")
    rows = [{"question": "q", "answer": "#### 1"}]
    right = gsm8k.hashlib.sha256(jsonl_text(rows).encode("utf-8")).hexdigest()
    monkeypatch.setattr(gsm8k, "FILES", {"train": (1, right), "test": (1, FILES["test"][1])})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    monkeypatch.setattr(gsm8k.fetch_gsm8k, "__defaults__", (tmp_path,))
    for split in FILES:
        (tmp_path / f"{split}.jsonl").write_text("as it was", encoding="utf-8")
    assert cli.main(["fetch", "gsm8k"]) != 0
    assert f"gsm8k test: got 1 rows, sha256 {right}; wanted" in capsys.readouterr().err
    assert {file.read_text(encoding="utf-8") for file in tmp_path.iterdir()} == {"as it was"}


# Text.


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.names = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)></pre><iframe>&lt;b&gt;'\"<answer>5</answer>"


def test_tags_in_a_response_are_text_wherever_it_is_shown(tmp_path):
    """In the viewer of notebook 01, and in a table as notebooks show it."""
    row = {"prompt": "r1_zero", "question": HOSTILE, "ground_truth": HOSTILE, "response": HOSTILE}
    table = pd.DataFrame([row | {"category": "format 0, answer 0", "reason": "wrong value"}])
    widget = verdicts.browse(table, verdicts.Verdicts(tmp_path / "verdicts.json"))
    shown = widget.children[1].value
    assert set(Tags(shown).names) == {"p", "b", "pre"} and shown.count("&lt;script&gt;") == 3
    assert not {"script", "img", "iframe"} & set(Tags(table.to_html()).names)


def test_no_response_reaches_the_write_up():
    """Its page is made of the chapters' Markdown and of numbers: HTML in a reader's own answers is the reader's."""
    source = (paths.ROOT / "notebooks/09_writeup.ipynb").read_text(encoding="utf-8")
    assert not re.search(r"read_rollouts|read_responses|rollouts/", source)
    export = (PACKAGE / "workbook/writeup.py").read_text(encoding="utf-8")
    assert "rollouts" not in export and "cell.outputs" in export and export.count("outputs") == 2


# Names and paths.

NAMES = ["../../x", "..", ".", "", "/etc/x", "a/b", "a\\b", "a\0b", "a\n", ".hidden", "~", "a b", "x" * 300]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["experiment", "variant", "prompt"])
def test_a_name_that_could_lead_elsewhere_is_refused(field, name):
    with pytest.raises(ValueError, match=f"{field}: got"):
        make_config(**{field: name})
    if field == "prompt":
        with pytest.raises(ValueError, match="prompt: got"):
            get_prompt(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_stays_in_data_runs_whatever_its_estimator_is_called(name, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    if name == "":
        with pytest.raises(ValueError, match=r"estimator: got .*accepted as its name is a text that is not empty"):
            make_config(estimator=Estimator(name))
        return
    folder = RunRecords(make_config(estimator=Estimator(name))).folder
    assert folder.resolve().parent.parent == (tmp_path / "runs/04_grpo").resolve() and folder.name == "seed=0"
    folder.mkdir(parents=True)


@pytest.mark.parametrize("name", [*NAMES, "gym/../../x", "gym/"])
def test_a_task_is_one_of_the_known_or_a_folder_with_its_files(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="task: got"):
        load_task(name, 1, 1)


@pytest.mark.parametrize("name", ["../../x", "..", "", "/etc/x", "a/b", "a\0b"])
def test_what_is_collected_is_named_by_a_folder_of_data_runs(name, roots, capsys):
    """`rlhelpers collect`: nothing is written."""
    assert cli.main(["collect", name]) == 2
    assert capsys.readouterr().err.startswith("rlhelpers: ")
    assert not roots[1].exists()


# Servers.


def test_a_server_of_ours_listens_where_no_other_machine_reaches_it(launch, monkeypatch):  # noqa: F811
    """vLLM's HTTP, and where torch, Gloo and NCCL meet; on a real vLLM: test_vllm_server.py looks at its sockets."""
    from rlhelpers.rollouts import vllm_server

    commands = []
    monkeypatch.setattr(vllm_server, "ServerProcess", lambda command, *_: commands.append(command) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        launch(host="localhost").start()
    [command] = commands
    assert command[command.index("--host") + 1] == "127.0.0.1"
    monkeypatch.setattr("sys.platform", "linux")
    given = server_environment(True, "shared_memory", None)
    assert (given["GLOO_SOCKET_IFNAME"], given["NCCL_SOCKET_IFNAME"], given["VLLM_HOST_IP"]) == (
        "lo",
        "lo",
        "127.0.0.1",
    )


def test_no_address_in_the_package_is_that_of_all_interfaces():
    for file in PACKAGE.rglob("*.py"):
        assert not re.search(r"0\.0\.0\.0|\[::\]|INADDR_ANY", file.read_text(encoding="utf-8")), file
    assert 'master_address="127.0.0.1"' in (PACKAGE / "rollouts/weight_sync.py").read_text(encoding="utf-8")
