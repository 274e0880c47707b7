"""The write-up: which problems there are, where the notebooks answer them, and notebook 09 as a page to hand in."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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


# On paper: tables that fit the page, broken between rows and not before them.
STYLE = """<style>
td, th { text-align: left !important; }
td code { white-space: normal; overflow-wrap: anywhere; }
@media print {
  table { font-size: 8pt !important; }
  tr, img, p { break-inside: avoid; }
  h1, h2, h3, h2 + p { break-after: avoid; }
  .jp-Cell, .jp-Cell-outputWrapper, .jp-OutputArea, .jp-OutputArea-child, .jp-OutputArea-output {
    display: block !important; break-inside: auto !important; overflow: visible !important;
  }
}
</style>
"""


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
    """Return where each problem stands: the first heading of each chapter that begins with its name.

    The handout's problems come first, in its order, then those that only the chapters have.  A problem that no chapter
    has gets [].
    """
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
    """Return the chapters' written answers, in Markdown, by problem; several where a problem has parts."""
    answers: dict[str, list[str]] = {}
    for _, cell in _cells():
        grading = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "markdown" and grading.get("solution"):
            problem = re.sub(r"_[a-z]$", "", grading.grade_id)
            answers.setdefault(problem, []).append(cell.source)
    return answers


def properties(problem: str) -> tuple[int, int]:
    """Return how many properties of this problem's function hold, and how many the chapters check.

    They are read from the notebooks' outputs: what held when they were run.  (0, 0) where no function is asked for.
    """
    for _, cell in _cells():
        grade_id = cell.metadata.get("nbgrader", {}).get("grade_id", "")
        if cell.cell_type == "code" and grade_id.startswith("check_") and problem.startswith(grade_id[6:]):
            printed = "".join(output.get("text", "") for output in cell.outputs)
            verdicts = re.findall(r"^  (holds|FAILS)", printed, re.MULTILINE)
            return verdicts.count("holds"), len(verdicts)
    return 0, 0


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows with the same keys as a table in Markdown."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def export(folder: Path | None = None) -> list[str]:
    """Run notebook 09 and write it to `folder` (default: data/runs/writeup); return what to tell the reader.

    writeup.html has no code and all figures.  writeup.pdf is made where a Chromium is installed.  Raises RuntimeError
    when the notebook or Chromium fails.
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

    notebook = nbformat.read(paths.ROOT / "notebooks" / NOTEBOOK, as_version=4)
    try:
        where = {"metadata": {"path": str(paths.ROOT / "notebooks")}}
        ExecutePreprocessor(timeout=600, kernel_name="python3").preprocess(notebook, where)
    except CellExecutionError as error:
        raise RuntimeError(f"{NOTEBOOK}: {error.ename}: {' '.join(error.evalue.split())}") from error
    for cell in notebook.cells:  # pictures are embedded only from below the path
        cell.source = cell.source.replace("](../figures/", "](figures/")
    chapters = os.path.relpath(paths.ROOT / "notebooks", folder)
    return re.sub(r'href="(\d\d_\w+\.ipynb)', rf'href="{chapters}/\1', _as_page(notebook))


def _as_page(notebook: nbformat.NotebookNode) -> str:
    """The notebook as HTML that needs no network: no code, pictures inside, formulas in MathML."""
    from latex2mathml.converter import convert
    from nbconvert import HTMLExporter
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    exporter = HTMLExporter(exclude_input=True, exclude_input_prompt=True, exclude_output_prompt=True)
    renderer = IPythonRenderer(escape=False, embed_images=True, path=str(paths.ROOT))
    # nbconvert leaves formulas as LaTeX for a script from the network; MathML is set by the browser itself.
    renderer.inline_math, renderer.block_math = convert, partial(convert, display="block")
    exporter.register_filter("markdown2html", MarkdownWithMath(renderer=renderer).render)
    notebook.metadata.title = "Write-up"
    html, _ = exporter.from_notebook_node(notebook)
    html = re.sub(r'<script src="https:[^"]*">\s*</script>', "", html)  # MathJax and RequireJS
    return html.replace("</head>", f"{STYLE}</head>", 1)


def _print(browser: str, page: Path, printed: Path) -> None:
    root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # as Chromium asks of root
    options = ["--headless", *root, "--no-pdf-header-footer"]
    printed.unlink(missing_ok=True)
    command = [browser, *options, f"--print-to-pdf={printed}", page.as_uri()]
    try:
        result = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=300, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{browser} printed no PDF in 300 s; the page is in {page}") from None
    if result.returncode or not printed.exists():
        raise RuntimeError(f"{browser} printed no PDF: {result.stderr.strip()[-500:] or f'exit {result.returncode}'}")
