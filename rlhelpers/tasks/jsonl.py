"""Files with a JSON object in each line, plain or gzipped, whose fields are texts."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path


def read_texts(path: Path, *fields: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number (from 1) and these fields of every line that is not empty; other fields are left out.

    A name that ends in .gz is unzipped.  Raises FileNotFoundError for a file that is not there, and ValueError naming
    file and line for what is no JSON object with a text in each field.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file; accepted is one of JSON lines with {_names(fields)}")
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _read_line(path, number, line, fields)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error!r}; accepted is UTF-8 text, gzipped where the name ends in .gz") from error


def write_texts(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Write rows that `read_texts` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def _open(path: Path):
    # Only "\n" ends a line: a text may hold other line breaks of Unicode.
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="\n")
    return open(path, encoding="utf-8-sig", newline="\n")


def _read_line(path: Path, number: int, line: str, fields: tuple[str, ...]) -> dict[str, str]:
    try:
        row = json.loads(line)
        wrong = [field for field in fields if not isinstance(row[field], str)]
        if wrong:
            raise TypeError(f"{wrong[0]} is {row[wrong[0]]!r:.40}, no text")
        return {field: row[field] for field in fields}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}: {error!r}; a line is a JSON object with {_names(fields)}") from error


def _names(fields: tuple[str, ...]) -> str:
    return "the texts " + ", ".join(fields)
