"""One thing that a look at a machine found, and findings as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """`remedy` is what to do about a warning or a problem.  A problem stops the run, a warning does not."""

    status: Literal["ok", "warning", "problem"]
    name: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.found} -> {self.remedy}" if self.remedy else self.found


def as_table(findings: Sequence[Finding]) -> str:
    """A line for each finding, and one that sums up."""
    width = max(len(f.name) for f in findings)
    lines = [f"{f.status:<7}  {f.name:<{width}}  {f}" for f in findings]
    problems, warnings = (sum(f.status == status for f in findings) for status in ("problem", "warning"))
    verdict = "this machine cannot do the run as it is configured" if problems else "this machine can do the run"
    return "\n".join([*lines, "", f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}: {verdict}."])


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
