"""What the tables of tests/test_bad_input_*.py share: values that are nothing an argument takes, and the rule."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch


class Nothing:
    """No list, no number, no text, no tensor."""


NOT_TEXT = [None, Nothing(), 3, True, b"text", ["text"], {}, math.nan]
NOT_A_NUMBER = [None, Nothing(), "1", "", True, [1], {}, math.nan, 10**20, torch.tensor(1.0), np.ones(2)]
NOT_POSITIVE = [*NOT_A_NUMBER, 0, -1, math.inf, np.float32(-1)]
NOT_WHOLE = [None, Nothing(), "1", True, [1], 1.5, math.nan, math.inf, np.float32(1), torch.tensor(1), np.ones(2), -1]
NOT_A_LIST = [None, Nothing(), "text", b"text", 3, {"a": 1}, {"a"}, math.nan, torch.tensor(1), (x for x in "ab")]
NOT_A_TENSOR = [None, Nothing(), "text", 3, True, math.nan, [[1.0, 2.0]], {}, np.ones((4, 5)), np.int64(1)]
NOT_A_NAME = [None, Nothing(), "", "unknown", 1, True, math.nan, [], ["mean"], {}, np.ones(2), torch.ones(2)]
NOT_A_FUNCTION = [None, Nothing(), "mean", 3, True, [len], {}, torch.ones(2)]
NOT_A_TABLE = [None, Nothing(), "text", 3, True, math.nan, [], {}, np.ones((2, 2)), torch.ones(2), pd.Series([1.0])]
NOT_A_FOLDER = [None, Nothing(), 3, True, math.nan, [], {}, b"folder"]
SOMETHING_ELSE = [None, Nothing(), "text", 3, True, math.nan, [], {}, np.ones(2), torch.ones(2)]


class Row(NamedTuple):
    """`function`, with good arguments but for `argument`, refuses each of `values` by a message with `message` in it;
    "": the argument's name and what it got."""

    function: str
    argument: str
    values: Sequence[Any]
    message: str = ""


def name_of(row: Row) -> str:
    return f"{row.function}-{row.argument}"


def check_refusal(good: Mapping[str, tuple[Callable, Mapping[str, Any]]], row: Row) -> None:
    """The rule: ValueError or FileNotFoundError that names the argument, and nothing from deep inside."""
    function, arguments = good[row.function]
    assert row.argument in arguments, f"{row.argument} is no argument of {row.function}"
    for value in row.values:
        with pytest.raises(Exception) as caught:
            function(**{**arguments, row.argument: value})
            pytest.fail(f"{name_of(row)} took {value!r}")
        assert isinstance(caught.value, ValueError | FileNotFoundError), f"{value!r}: {caught.value!r}"
        assert (row.message or f"{row.argument}: got ") in str(caught.value), f"{value!r}"
