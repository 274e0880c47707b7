"""Where the workbook lives: every path starts at the repository's root, whatever directory a tool runs in."""

import os
from pathlib import Path

ROOT = Path(os.environ.get("RLHELPERS_ROOT") or Path(__file__).resolve().parent.parent)
DATA = ROOT / "data"
TINY = DATA / "tiny"
GSM8K = DATA / "gsm8k"
RUNS = DATA / "runs"
RESULTS = DATA / "results"
FIGURES = ROOT / "figures"
