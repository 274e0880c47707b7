"""JSON that every parser reads."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any


def strict_json(value: Any, **options: Any) -> str:
    """As text: NaN and infinities become null, tensors and numpy scalars numbers."""
    return json.dumps(_plain(value), allow_nan=False, ensure_ascii=False, **options)


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line for each row."""
    return "".join(strict_json(row) + "\n" for row in rows)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # torch tensors and numpy arrays and scalars
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
