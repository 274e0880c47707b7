"""The `papermill` command of this environment: papermill's own, and the output path may be left out.

Papermill refuses a call without an output path in a terminal, and prints the whole notebook into a pipe.  Here the
executed notebook then goes to `data/runs/notebooks/`.  What the notebook prints is shown while it runs: a person can
watch a training run.  `--no-log-output` brings back papermill's bar of cells.

Of a parameter that is given more than once, the last of this order counts: -b, -f, -y, -p, -r.
"""

import json
import keyword
import math
import os
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhelpers import files, paths


def main() -> None:
    from papermill.cli import papermill

    try:
        arguments = complete(papermill, sys.argv[1:])
    except ValueError as error:
        sys.exit(f"papermill: {error}")
    papermill(arguments, prog_name="papermill")


def complete(command, arguments: list[str]) -> list[str]:
    """Return the arguments with an output path, --log-output, and a kernel where the notebook's own is not here.

    Where nothing will be run they are unchanged.  The folder of the output is made.  Raises ValueError in one line for
    what papermill would let pass: a name that no parameter can have; a file or text of parameters that is no mapping,
    gives a name twice or a number that is not finite; parameters for a notebook without a cell tagged `parameters`,
    whose own values would replace them; an output that is the notebook itself.
    """
    parsed = command.make_context("papermill", list(arguments), resilient_parsing=True).params
    notebook, output = parsed["notebook_path"], parsed["output_path"]
    given = _check_parameters(parsed)
    if not notebook or parsed["help_notebook"]:
        return arguments
    if output and Path(output).resolve() == Path(notebook).resolve():
        raise ValueError(f"the output {output} is the notebook itself; give it another name")
    arguments = [*_with_text_for_infinities(arguments), *_check_notebook(notebook, given, parsed["kernel"])]
    if not output:
        name = f"{Path(notebook).stem}_{datetime.now():%Y-%m-%d_%H-%M-%S}_{os.getpid()}.ipynb"
        output = str(paths.RUNS / "notebooks" / name)
        arguments.append(output)
    if "://" not in output and "{" not in output:  # no other place, and no name that papermill is to fill in
        Path(output).parent.mkdir(parents=True, exist_ok=True)
    shown = output == "-" or {"--log-output", "--no-log-output"} & set(arguments)
    return arguments if shown else [*arguments, "--log-output"]


def _check_parameters(parsed: Mapping[str, Any]) -> list[str]:
    """Return the names that are given.  The notebook checks the values."""
    names = []
    for file in parsed["parameters_file"] or ():
        if "://" not in file:
            if not Path(file).is_file():
                raise ValueError(f"-f {file}: there is no such file")
            names += _names(Path(file).read_text(encoding="utf-8"), f"-f {file}")
    for text in parsed["parameters_yaml"] or ():
        names += _names(text, "-y")
    for name, _ in [*(parsed["parameters"] or ()), *(parsed["parameters_raw"] or ())]:
        if not name.isidentifier() or keyword.iskeyword(name):
            hint = f"; did you mean {name.replace('-', '_')}?" if "-" in name else ""
            raise ValueError(f"-p {name}: no parameter has such a name{hint}")
        names.append(name)
    return names


def _names(text: str, where: str) -> list[str]:
    """Return the names of a mapping in YAML.  An empty text has none, and a line says so."""
    content = files.load_yaml(text, where)
    if content is None:
        print(f"papermill: {where} holds no parameters", file=sys.stderr)
        return []
    if not isinstance(content, dict):
        raise ValueError(f"{where}: got {type(content).__name__}; accepted are lines such as learning_rate: 3e-4")
    for name, value in content.items():
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(f"{where}: {name}: no parameter has such a name")
        try:
            json.dumps(value, allow_nan=False, default=str)
        except ValueError:
            raise ValueError(
                f"{where}: {name}: got {value}, which JSON has not; accepted is a text, '{value}'"
            ) from None
    return list(content)


def _with_text_for_infinities(arguments: list[str]) -> list[str]:
    """Write `-p name inf` as `-r name inf`: papermill writes parameters into the notebook, and JSON has no infinity.

    The check of the notebook's parameters reads the text as well.
    """
    changed = list(arguments)
    for i, word in enumerate(arguments[:-2]):
        if word in ("-p", "--parameters") and not _is_finite(arguments[i + 2]):
            changed[i] = "-r"
    return changed


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return True  # no number at all


def _check_notebook(notebook: str, given: list[str], kernel: str | None) -> list[str]:
    """Return further arguments.  What is no notebook on this machine is left to papermill."""
    try:
        content = json.loads(Path(notebook).read_text(encoding="utf-8"))
        tags = [tag for cell in content["cells"] for tag in cell["metadata"].get("tags", ())]
        spec = content["metadata"].get("kernelspec", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    if given and "parameters" not in tags:
        raise ValueError(
            f"{notebook}: no cell has the tag `parameters`; its own values would replace {', '.join(given)}"
        )
    from jupyter_client.kernelspec import find_kernel_specs

    name = spec.get("name", "python3")
    if kernel or spec.get("language") != "python" or name in find_kernel_specs():
        return []
    print(f"papermill: there is no kernel {name} here; it runs with python3, {sys.executable}", file=sys.stderr)
    return ["--kernel", "python3"]
