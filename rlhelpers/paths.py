"""Where the workbook lives: every path starts at the repository's root, whatever directory a tool runs in."""

import os
import re
import zlib
from pathlib import Path

ROOT = Path(os.environ.get("RLHELPERS_ROOT") or Path(__file__).resolve().parent.parent)
DATA = ROOT / "data"
TINY = DATA / "tiny"
GSM8K = DATA / "gsm8k"
RUNS = DATA / "runs"
RESULTS = DATA / "results"
FIGURES = ROOT / "figures"


def file_name(text: str, of_no_other: bool = False) -> str:
    """The text as a name that file systems take: other signs become "-", and so does a dot in front, which would hide
    the file or, as in "..", name another folder.  A longer one than they take, who count bytes, ends in a checksum of
    the whole.  `of_no_other`: one that lost a sign does so too."""
    name = "".join(c if c.isalnum() or c in "._,=+-" else "-" for c in text)
    name = re.sub(r"^\.", "-", name)
    if len(name.encode("utf-8")) <= 200 and not (of_no_other and name != text):
        return name
    start = name.encode("utf-8")[:190].decode("utf-8", errors="ignore")
    return f"{start}-{zlib.crc32(text.encode('utf-8')):08x}"
