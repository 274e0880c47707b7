"""The write-up: which problems there are, where the notebooks answer them, and notebook 09 as a page to hand in."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat

from rlhelpers import paths

NOTEBOOK = "09_writeup.ipynb"
# The handout's problems and their points, sections 3 to 7.
POINTS = {
    "prompting_baselines": 5,
    "baseline_calcs": 5,
    "tokenize_prompt_and_output": 1,
    "get_response_log_probs": 1,
    "compute_rollout_rewards": 1,
    "compute_group_normalized_rewards_grpo": 1,
    "compute_policy_gradient_loss_on_policy": 1,
    "aggregate_loss_across_microbatch_sequence": 0.5,
    "grpo_train_step_standard_on_policy": 5,
    "grpo_experiments_standard_on_policy": 10,
    "grpo_learning_rate": 3,
    "grpo_prompt_ablation": 3,
    "think_about_length_normalization": 1,
    "compute_group_normalized_rewards_drgrpo": 0.5,
    "aggregate_loss_across_microbatch_constant": 0.5,
    "think_about_rft": 2,
    "derive_difficulty_reweightings": 6,
    "think_about_advantage_normalization": 2,
    "compute_group_normalized_rewards_maxrl": 0.5,
    "grpo_train_step_variants_on_policy": 2.5,
    "grpo_experiments_variants_on_policy": 10,
    "derive_surrogate_objectives": 2,
    "compute_policy_gradient_loss_off_policy": 1,
    "think_about_importance_reweighting": 2,
    "compute_policy_gradient_loss_off_policy_gspo": 1,
    "grpo_train_step_off_policy": 2.5,
    "grpo_experiments_off_policy": 10,
    "try_your_own": 10,
}
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@dataclass(frozen=True)
class Place:
    """A heading of a notebook."""

    notebook: str
    heading: str

    @property
    def link(self) -> str:
        """In Markdown, as JupyterLab and nbconvert name their headings."""
        anchor = self.heading.replace("`", "").replace(" ", "-")
        return f"[{self.notebook.removesuffix('.ipynb')}](<{self.notebook}#{anchor}>)"


def _cells() -> Iterator[tuple[str, nbformat.NotebookNode]]:
    """All cells of the chapters, with the names of their notebooks."""
    for file in sorted((paths.ROOT / "notebooks").glob("*.ipynb")):
        if file.name != NOTEBOOK:
            for cell in nbformat.read(file, as_version=4).cells:
                yield file.name, cell


def places() -> dict[str, list[Place]]:
    """Where each problem stands: the first heading of each chapter that begins with its name.  First the handout's
    problems in its order, then whatever else the chapters have; [] for a problem that no chapter has."""
    found: dict[str, list[Place]] = {name: [] for name in POINTS}
    for notebook, cell in _cells():
        headings = re.findall(r"^##+ (`.*)$", cell.source, re.MULTILINE) if cell.cell_type == "markdown" else []
        for heading in headings:
            for name in re.findall(r"`([a-z0-9_]+)`", heading):
                known = found.setdefault(name, [])
                if notebook not in [place.notebook for place in known]:
                    known.append(Place(notebook, heading))
    return found


def written_answers() -> dict[str, list[str]]:
    """The written answers of the chapters, in Markdown, by problem; several where a problem has parts."""
    answers: dict[str, list[str]] = {}
    for _, cell in _cells():
        grading = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "markdown" and grading.get("solution"):
            problem = re.sub(r"_[a-z]$", "", grading.grade_id)
            answers.setdefault(problem, []).append(cell.source)
    return answers


def properties(problem: str) -> tuple[int, int]:
    """Of the properties that the chapters check of this problem's function, how many hold and how many there are; (0,
    0) where no function is asked for.  Read from the notebooks' outputs: they say what held when they were run."""
    for _, cell in _cells():
        grade_id = cell.metadata.get("nbgrader", {}).get("grade_id", "")
        if cell.cell_type == "code" and grade_id.startswith("check_") and problem.startswith(grade_id[6:]):
            printed = "".join(output.get("text", "") for output in cell.outputs)
            verdicts = re.findall(r"^  (holds|FAILS)", printed, re.MULTILINE)
            return verdicts.count("holds"), len(verdicts)
    return 0, 0


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows with the same keys, as a table in Markdown."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def export(folder: Path | None = None) -> list[str]:
    """Run notebook 09 and write it to `folder` (default: data/runs/writeup) as writeup.html, without its code, with the
    figures inside; and as writeup.pdf where a Chromium is installed.  Returns what to tell the reader.

    Raises RuntimeError when the notebook or Chromium fails.
    """
    folder = (paths.RUNS / "writeup" if folder is None else Path(folder)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    page, printed = folder / "writeup.html", folder / "writeup.pdf"
    page.write_text(_as_html(folder), encoding="utf-8")
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if browser is None:
        printed.unlink(missing_ok=True)  # of an earlier write-up
        return [f"The write-up is in {page}", f"No PDF: there is no Chromium here ({', '.join(CHROMIUM)})"]
    _print(browser, page, printed)
    return [f"The write-up is in {page}", f"and in {printed}"]


def _as_html(folder: Path) -> str:
    from nbconvert.preprocessors import CellExecutionError, ExecutePreprocessor

    from rlhelpers.workbook.page import as_page

    notebook = nbformat.read(paths.ROOT / "notebooks" / NOTEBOOK, as_version=4)
    try:
        where = {"metadata": {"path": str(paths.ROOT / "notebooks")}}
        ExecutePreprocessor(timeout=600, kernel_name="python3").preprocess(notebook, where)
    except CellExecutionError as error:
        raise RuntimeError(f"{NOTEBOOK}: {error.ename}: {' '.join(error.evalue.split())}") from error
    for cell in notebook.cells:  # pictures are embedded only from below the path
        cell.source = cell.source.replace("](../figures/", "](figures/")
    chapters = os.path.relpath(paths.ROOT / "notebooks", folder)
    return re.sub(r'href="(\d\d_\w+\.ipynb)', rf'href="{chapters}/\1', as_page(notebook, "Write-up", paths.ROOT))


def _print(browser: str, page: Path, printed: Path) -> None:
    root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # as Chromium asks of root
    options = ["--headless", *root, "--no-pdf-header-footer"]
    printed.unlink(missing_ok=True)
    command = [browser, *options, f"--print-to-pdf={printed}", page.as_uri()]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=300, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{browser} printed no PDF in 300 s; the page is in {page}") from None
    if result.returncode or not printed.exists():
        raise RuntimeError(f"{browser} printed no PDF: {result.stderr.strip()[-500:] or f'exit {result.returncode}'}")
