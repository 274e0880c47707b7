"""Files and folders that are there whole or not at all, whatever ends the writing process or fills the disk; JSON that
every parser reads; YAML whose errors are one line."""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

MARK = ".tmp"  # the end of a name that is still being written

# --- atomic writing --------------------------------------------------------------------------------------------------


class NotWrittenError(OSError):
    """A file or folder could not be written, mostly because the disk is full.  What had its name before is there."""


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content: readers see the old or the new one, never half of it.  Raises NotWrittenError."""
    with whole_file(path) as new:
        new.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name to write to; at the end of the block, sync that file to disk and rename it to `path`.

    After an error nothing is left.  An error in writing is raised as NotWrittenError.
    """
    temporary = _temporary(path)
    with _naming(path):
        try:
            yield temporary
            to_disk(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder; at the end of the block, sync it to disk and rename it to `folder`.

    An earlier folder of that name is removed just before.  After an error nothing is left.  The errors that libraries
    have for a full disk are raised as NotWrittenError.
    """
    temporary = _temporary(folder)
    with _naming(folder):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
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


def append(path: Path, text: str) -> None:
    """Add to the end of a file, which after an error is as it was before.  Raises NotWrittenError."""
    size = path.stat().st_size if path.exists() else None
    with _naming(path):
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)
        except BaseException:
            path.unlink(missing_ok=True) if size is None else os.truncate(path, size)
            raise


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left in a folder.  Nobody may be writing into it."""
    for path in folder.glob(f"*{MARK}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, would survive a power failure.  Raises NotWrittenError."""
    with _naming(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise an error inside as a NotWrittenError that names the path.  The system's own seldom does, and safetensors,
    tokenizers and torch.save each have an error of another kind."""
    try:
        yield
    except Exception as error:
        if isinstance(error, NotWrittenError) and str(path) in str(error):
            raise
        said = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        free = shutil.disk_usage(path.parent).free / 2**20 if path.parent.exists() else 0
        raise NotWrittenError(
            f"{path}: could not be written ({' '.join(said.split())}; {free:,.1f} MiB are free there); "
            "what was there before is whole"
        ) from error


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}{MARK}")


# --- JSON and YAML ---------------------------------------------------------------------------------------------------


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return JSON without NaN and infinities, which become null.  Tensors and arrays become numbers and lists."""
    from pydantic_core import to_json  # here, because most who write files write no JSON

    return to_json(value, indent=indent, inf_nan_mode="null", fallback=_numbers).decode("utf-8")


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a line of JSON for each row."""
    return "".join(strict_json(row) + "\n" for row in rows)


def _numbers(value: Any) -> Any:
    """Return what is in a tensor of torch, or in an array or scalar of numpy."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"a {type(value).__name__} is not JSON")
    return value.tolist()


class _Loader(yaml.SafeLoader):
    """Refuses a mapping in which a name stands twice; YAML would take the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)}: given twice, line {node.start_mark.line + 1} and after")
        return node


def load_yaml(text: str, where: str) -> Any:
    """Return the content.  Raises ValueError with one line that begins with `where`, the file's name."""
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{where}: {' '.join(f'{error}'.split())}") from error


def sha256(file: Path) -> str:
    """Return the checksum of a file's bytes, as `sha256sum` writes it."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
