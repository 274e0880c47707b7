"""The reader's own verdicts on responses: a table to browse and tick, and a file that keeps the ticks."""

import hashlib
import html
import json
from pathlib import Path

import ipywidgets as widgets
import pandas as pd

from rlhelpers.files import write_atomically

CHOICES = {None: "not judged", True: "right in substance", False: "wrong"}
MARKS = {None: " ", True: "✓", False: "✗"}


class Verdicts:
    """Verdicts in a JSON file, written at every tick.

    A verdict belongs to prompt, question and response together.  Who samples the same response again finds it ticked,
    and no tick ever moves to another response.
    """

    def __init__(self, path: Path):
        """Read the file where it is there.  Raises ValueError when it does not hold verdicts."""
        self.path = Path(path)
        self._kept = _read(self.path) if self.path.exists() else {}

    def __getitem__(self, row: pd.Series) -> bool | None:
        """Return True for right in substance, False for wrong, None for not judged."""
        return self._kept.get(_key(row), {}).get("right")

    def __setitem__(self, row: pd.Series, right: bool | None) -> None:
        self._kept.pop(_key(row), None)
        if right is not None:
            seen = {name: row[name] for name in ("prompt", "question", "ground_truth", "response")}
            self._kept[_key(row)] = {"right": right, **seen}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(self._kept, indent=1, ensure_ascii=False) + "\n")

    def of(self, table: pd.DataFrame) -> pd.Series:
        """Return the verdict on each row: True, False or None."""
        return pd.Series([self[row] for _, row in table.iterrows()], index=table.index, dtype=object)


def _read(path: Path) -> dict[str, dict]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if all(isinstance(entry["right"], bool) for entry in kept.values()):
            return kept
    except (ValueError, TypeError, KeyError, AttributeError):
        pass  # the same error for all of them
    raise ValueError(f"{path.name}: not a file of verdicts; move it away to begin anew")


def _key(row: pd.Series) -> str:
    parts = "\0".join((row["prompt"], row["question"], row["response"]))
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def browse(table: pd.DataFrame, verdicts: Verdicts):
    """Return a widget: the list of responses, the chosen one in full, and the three choices of a verdict.

    `table` has the columns prompt, question, ground_truth, response, category and reason, and at least one row.
    """
    rows = [row for _, row in table.iterrows()]
    listed = widgets.Select(options=_labels(rows, verdicts), rows=8, layout=widgets.Layout(width="100%"))
    shown = widgets.HTML()
    choice = widgets.ToggleButtons(options=list(CHOICES.values()))
    back, forward = widgets.Button(description="previous"), widgets.Button(description="next")

    def show(_=None):
        row = rows[listed.value]
        shown.value = _as_html(row)
        choice.value = CHOICES[verdicts[row]]

    def keep(change):
        place = listed.value
        chosen = next(right for right, label in CHOICES.items() if label == change.new)
        if verdicts[rows[place]] != chosen:
            verdicts[rows[place]] = chosen
            listed.options = _labels(rows, verdicts)  # which goes back to the first
            listed.value = place

    def step(by: int):
        listed.value = (listed.value + by) % len(rows)

    listed.observe(show, "value")
    choice.observe(keep, "value")
    back.on_click(lambda _: step(-1))
    forward.on_click(lambda _: step(1))
    show()
    return widgets.VBox([listed, shown, widgets.HBox([back, forward, choice])])


def _labels(rows: list[pd.Series], verdicts: Verdicts) -> list[tuple[str, int]]:
    return [
        (f"{MARKS[verdicts[row]]} {i + 1:>2}  {row.prompt}  |  {row.category}  |  {row.reason}", i)
        for i, row in enumerate(rows)
    ]


def _as_html(row: pd.Series) -> str:
    """Everything that a person needs to judge.  Tags in a response are text here."""
    question, truth, response = (html.escape(row[name]) for name in ("question", "ground_truth", "response"))
    return (
        f"<p><b>Question</b> {question}</p><p><b>Ground truth</b> {truth}</p>"
        f"<pre style='white-space: pre-wrap; line-height: 1.3'>{response}</pre>"
    )
