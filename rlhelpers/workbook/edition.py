"""The exercise edition of the notebooks: nbgrader takes out solutions, written answers and outputs."""

import logging
from pathlib import Path

import nbformat

from rlhelpers import paths
from rlhelpers.workbook import writeup


def write_exercises(folder: str | Path) -> list[Path]:
    """Write each notebook to `folder` as a student gets it; return the files.

    The write-up is left out: it has nothing to solve and all the answers.  Before anything is written, raises
    ModuleNotFoundError without nbgrader, FileNotFoundError where there is no notebook, FileExistsError for a notebook
    that is in the folder already (it may hold somebody's work), ValueError for one that nbgrader does not take.
    """
    folder, preprocessors = Path(folder).expanduser(), _preprocessors()
    sources = sorted(file for file in (paths.ROOT / "notebooks").glob("*.ipynb") if file.name != writeup.NOTEBOOK)
    if not sources:
        raise FileNotFoundError(f"{paths.ROOT / 'notebooks'} holds no notebook")
    for source in sources:
        if (folder / source.name).exists():
            raise FileExistsError(f"{folder / source.name} exists already; choose another folder")
    notebooks = {folder / source.name: _stripped(source, preprocessors) for source in sources}
    folder.mkdir(parents=True, exist_ok=True)
    for file, notebook in notebooks.items():
        nbformat.write(notebook, file)
    return list(notebooks)


def _stripped(source: Path, preprocessors: list) -> nbformat.NotebookNode:
    try:
        notebook, resources = nbformat.read(source, as_version=4), {}
        for preprocessor in preprocessors:
            notebook, resources = preprocessor.preprocess(notebook, resources)
    except Exception as error:  # nbgrader raises errors of many kinds
        raise ValueError(f"{source.name}: {type(error).__name__}: {error}") from error
    return notebook


def _preprocessors() -> list:
    """Those of `nbgrader generate_assignment` that need neither its database nor a header."""
    try:
        from nbgrader import preprocessors
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('nbgrader is not installed; pip install nbgrader, or --editable ".[dev]"') from error
    names = ("CheckCellMetadata", "ClearSolutions", "LockCells", "ClearOutput", "ClearHiddenTests", "ComputeChecksums")
    made = [getattr(preprocessors, name)() for name in names]
    for preprocessor in made:
        preprocessor.log.setLevel(logging.ERROR)
    return made
