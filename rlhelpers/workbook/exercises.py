"""The exercise edition of the notebooks: solutions, written answers and outputs taken out by nbgrader's own hand."""

import logging
from pathlib import Path

import nbformat

from rlhelpers import paths


def write_exercises(folder: str | Path) -> list[Path]:
    """Write each notebook of `notebooks/` to `folder` as a student gets it; returns the files.

    Raises ModuleNotFoundError where nbgrader is missing, and FileExistsError naming a notebook that stands in the
    folder already, before anything is written: it may hold somebody's work.
    """
    preprocessors = _preprocessors()
    sources = sorted((paths.ROOT / "notebooks").glob("*.ipynb"))
    files = [Path(folder) / source.name for source in sources]
    for file in files:
        if file.exists():
            raise FileExistsError(f"{file} exists already; choose another folder")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for source, file in zip(sources, files, strict=True):
        notebook, resources = nbformat.read(source, as_version=4), {}
        for preprocessor in preprocessors:
            notebook, resources = preprocessor.preprocess(notebook, resources)
        nbformat.write(notebook, file)
    return files


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
