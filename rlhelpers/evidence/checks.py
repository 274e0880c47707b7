"""Checks of tables: of runs, of curves and of final scores."""

from collections.abc import Hashable

import pandas as pd

from rlhelpers.checks import check_kind, shown


def check_table(*columns: str, **tables: pd.DataFrame) -> None:
    """Raise ValueError unless each is a table with these columns."""
    check_kind(pd.DataFrame, "a table (pandas DataFrame)", **tables)
    for name, table in tables.items():
        if missing := [column for column in columns if column not in table]:
            raise ValueError(f"{name}: got a table without {', '.join(missing)}; it has {_names(table)}")


def check_column(table: pd.DataFrame, **columns: Hashable) -> None:
    """Raise ValueError unless each names a column of the table."""
    for name, column in columns.items():
        if not isinstance(column, Hashable) or column not in table:
            raise ValueError(f"{name}: got {shown(column)}; accepted are {_names(table) or 'none'}")


def check_runs(runs: pd.DataFrame, by: str) -> None:
    """Raise ValueError unless it is a table of runs, as list_runs gives it, with a column `by`."""
    check_table(runs=runs)
    check_column(runs, by=by)
    check_table("seed", "metrics", runs=runs)


def _names(table: pd.DataFrame) -> str:
    return ", ".join(map(str, table))
