"""Data files that a reader brings: CSV, JSON and JSON lines in UTF-8, gzipped where the name ends in .gz.  What is
wrong with one is said with its line."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhelpers.atomic import write_atomically
from rlhelpers.strict_json import json_lines

Row = tuple[int, list[str]]


def read_text(path: Path) -> str:
    """Raises FileNotFoundError, or ValueError for what is not UTF-8, or not gzipped though its name says so."""
    if not path.is_file():
        raise FileNotFoundError(f"data: got {str(path)!r}; there is no such file")
    content = path.read_bytes()
    try:
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: {error}; the file must be gzipped, as its name says") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: {error.reason}; the file must be UTF-8") from error


def read_csv(path: Path) -> list[Row]:
    """The rows that are not blank, each with the number of its first line; a field may span lines.  Raises ValueError
    where a quote is not closed, and for a file without rows."""
    rows, begins = [], 1
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        for row in reader:
            if row:
                rows.append((begins, row))
            begins = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {begins}: {error}; the file must be CSV with commas and double quotes"
        ) from error
    if not rows:
        raise ValueError(f"{path}: holds no rows")
    return rows


def read_objects(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSON array or of JSON lines, each with the number of its line (in an array: its own number).
    Raises ValueError for anything else, for half of a surrogate pair, and for a file without objects."""
    text = read_text(path)
    found = _array(path, text) if text.lstrip().startswith("[") else _lines(path, text)
    escapes = "\\u" in text  # looked for once: it is the whole file
    for number, value in found:
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {number}: got {str(value)[:40]!r}; accepted is a JSON object")
        if escapes and not _is_unicode(value):
            raise ValueError(f"{path}, line {number}: got half of a surrogate pair; accepted is what UTF-8 can hold")
    if not found:
        raise ValueError(f"{path}: holds no objects")
    return found


def read_texts(path: Path, *fields: str) -> list[dict[str, str]]:
    """These fields of every object of a file, each a text, which may be empty; other fields are left behind.  Raises
    what read_objects does, and ValueError for a field that is missing or no text."""
    objects = read_objects(path)
    for number, row in objects:
        for name in fields:
            if not isinstance(row.get(name), str):
                got = f"got {row[name]!r:.40}" if name in row else "it is missing"
                raise ValueError(f"{path}, line {number}: {name}: {got}; accepted are texts as {', '.join(fields)}")
    return [{name: row[name] for name in fields} for _, row in objects]


def write_texts(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Write JSON lines, which read_texts reads; the folder is made where it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json_lines(rows))


def text_field(path: Path, number: int, row: dict[str, Any], name: str) -> str:
    """`row[name]`.  Raises ValueError unless it is there and a text that is not blank."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        got = f"got {value!r}" if name in row else "it is missing"
        raise ValueError(f"{path}, line {number}: {name}: {got}; accepted is a text that is not empty")
    return value


def _array(path: Path, text: str) -> list[tuple[int, Any]]:
    try:
        return list(enumerate(json.loads(text), start=1))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}; the file must be JSON") from error
    except (ValueError, RecursionError) as error:  # also an integer of more than 4,300 digits
        raise ValueError(f"{path}: {error}; the file must be JSON") from error


def _lines(path: Path, text: str) -> list[tuple[int, Any]]:
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            found += [(number, json.loads(line))] if line.strip() else []
        except (ValueError, RecursionError) as error:  # also an integer of more than 4,300 digits
            raise ValueError(f"{path}, line {number}: {error}; a line must be one JSON object") from error
    return found


def _is_unicode(value: dict[str, Any]) -> bool:
    """JSON may escape half of a surrogate pair, which no tokenizer reads and no file takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
