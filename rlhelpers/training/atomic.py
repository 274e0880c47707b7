"""Files and folders that are there whole or not at all, whatever ends the process that writes them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = ".tmp"  # what ends so was being written


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never half of it."""
    temporary = _temporary(path)
    temporary.write_text(text, encoding="utf-8")
    to_disk(temporary)
    temporary.replace(path)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which is on the disk before it gets the name `folder`, at the end of the block.

    What had that name goes just before.  After an error nothing is left.
    """
    temporary = _temporary(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            to_disk(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)
    to_disk(folder.parent)


def remove_leftovers(folder: Path) -> None:
    """What writers left in a folder that were killed.  Nobody may be writing into it."""
    for path in folder.glob(f"*{MARK}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, would outlive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}{MARK}")
