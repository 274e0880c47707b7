"""SimpleSafetyTests (arXiv:2311.08370): 100 prompts with which a model should not comply, in five areas of harm."""

from pathlib import Path
from typing import Any

from rlhelpers.strict_json import json_lines
from rlhelpers.tasks.data_files import read_csv, text_field
from rlhelpers.tasks.example import Example

PROMPT_COLUMNS = ("prompts_final", "prompt")  # the handout's file, and the one that the authors publish


def read_safety_tests(path: Path) -> list[Example]:
    """The prompts of a CSV file with a header and the columns `id`, `harm_area`, `prompts_final` (or `prompt`) and, if
    it likes, others, of which `category` is kept.  Raises ValueError naming file and line."""
    (_, header), *rows = read_csv(path)
    column = next((name for name in PROMPT_COLUMNS if name in header), PROMPT_COLUMNS[0])
    if missing := [name for name in ("id", "harm_area", column) if name not in header]:
        raise ValueError(f"{path}, line 1: got the columns {', '.join(header)}; missing: {', '.join(missing)}")
    if doubled := [name for name in ("id", "harm_area", "category", column) if header.count(name) > 1]:
        raise ValueError(f"{path}, line 1: got the columns {', '.join(header)}; more than once: {', '.join(doubled)}")
    if not rows:
        raise ValueError(f"{path}: holds no prompts")
    examples = []
    for line, cells in rows:
        if len(cells) != len(header):
            raise ValueError(f"{path}, line {line}: got {len(cells)} columns; the header has {len(header)}")
        row = dict(zip(header, cells, strict=True))
        prompt = text_field(path, line, row, column)
        fields = {name: row[name] for name in ("id", "harm_area", "category") if name in row}
        examples.append(Example(fields | {"prompts_final": prompt}, prompt))
    return examples


def to_safety_judge(rows: list[dict[str, Any]], generator: str) -> str:
    """JSON lines with `prompts_final` and `output`, as the course's evaluator and `judge_safety` read them."""
    names = ("id", "harm_area", "category", "prompts_final", "output")
    return json_lines({name: row[name] for name in names if name in row} | {"generator": generator} for row in rows)
