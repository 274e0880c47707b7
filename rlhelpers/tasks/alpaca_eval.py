"""AlpacaEval (github.com/tatsu-lab/alpaca_eval): 805 instructions, whose answers its own tool compares with another
model's."""

from pathlib import Path
from typing import Any

from rlhelpers.strict_json import strict_json
from rlhelpers.tasks.data_files import read_objects, text_field
from rlhelpers.tasks.example import Example


def read_alpaca_eval(path: Path) -> list[Example]:
    """The instructions of a JSON array or of JSON lines with `instruction` and `dataset`.  Other keys, such as the
    reference model's `output`, are left behind.  Raises ValueError naming file and line."""
    return [
        Example(
            {"dataset": text_field(path, number, row, "dataset")},
            instruction=text_field(path, number, row, "instruction"),
        )
        for number, row in read_objects(path)
    ]


def to_alpaca_eval(rows: list[dict[str, Any]], generator: str) -> str:
    """The JSON array that `alpaca_eval --model_outputs` reads: instruction, output, generator, dataset."""
    outputs = [
        {name: row[name] for name in ("instruction", "output")} | {"generator": generator, "dataset": row["dataset"]}
        for row in rows
    ]
    return strict_json(outputs, indent=1) + "\n"
