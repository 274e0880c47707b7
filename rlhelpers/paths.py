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


def file_name(text: str, unique: bool = False) -> str:
    """Return the text as a name that file systems take.  Other signs become "-", and so does a dot in front, which
    would hide the file or, as in "..", name another folder.

    A name of more than 200 bytes is cut and ends in a checksum of the whole text.  unique: so does one of which a sign
    was replaced.
    """
    name = "".join(c if c.isalnum() or c in "._,=+-" else "-" for c in text)
    name = re.sub(r"^\.", "-", name)
    if len(name.encode("utf-8")) <= 200 and not (unique and name != text):
        return name
    start = name.encode("utf-8")[:190].decode("utf-8", errors="ignore")
    return f"{start}-{zlib.crc32(text.encode('utf-8')):08x}"
