"""What people met in public: every report has a test somewhere, under its id."""

import json
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPORTS = HERE.parents[1] / "shared/cases/field_reports.jsonl"


@pytest.mark.skipif(not REPORTS.exists(), reason="the reports are not at hand")
def test_every_report_has_its_test():
    with REPORTS.open(encoding="utf-8") as lines:
        reported = {report["id"] for report in map(json.loads, lines)}
    sources = [file.read_text(encoding="utf-8") for file in HERE.glob("test_*.py")]
    marked = {name for text in sources if "field_report" in text for name in re.findall(r'"([A-Z]\d\d)"', text)}
    named = {name.upper() for text in sources for name in re.findall(r"def test_([a-z]\d\d)_", text)}
    assert reported <= marked | named
