"""Every report of what people met in public has its test, which is marked with the report's id."""

import json
import re
from pathlib import Path

import pytest

REPORTS = Path(__file__).parents[2] / "shared/cases/field_reports.jsonl"


@pytest.mark.skipif(not REPORTS.exists(), reason="the reports are not at hand")
@pytest.mark.parametrize("group", ["C"])
def test_every_report_has_its_test(group):
    with REPORTS.open(encoding="utf-8") as lines:
        reported = {report["id"] for report in map(json.loads, lines) if report["group"] == group}
    texts = [file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_*.py")]
    marked = {number for text in texts for number in re.findall(r'field_report\("(\w+)"\)', text)}
    assert reported and reported <= marked
    assert {number for number in marked if number.startswith(group)} == reported
