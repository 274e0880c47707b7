"""Files and folders that are there whole or not at all, whatever ends the process that writes, or fills the disk.

JSON that every parser reads.

YAML in which no name stands twice in one mapping; what is wrong with it is said in one line."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

MARK = ".tmp"  # what ends so was being written


class NotWrittenError(OSError):
    """A file or folder could not be written, mostly for want of room.  What had its name before is there as it was."""


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never half of it.  Raises NotWrittenError."""
    with whole_file(path) as new:
        new.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write to; that file is on the disk before it gets the name `path`, at the end of the block.

    After an error nothing is left; one of those that writing brings is a NotWrittenError.
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
    """An empty folder to write into, which is on the disk before it gets the name `folder`, at the end of the block.

    What had that name goes just before.  After an error nothing is left; any of those that libraries have for a full
    disk is a NotWrittenError.
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
    """What writers left in a folder that were killed.  Nobody may be writing into it."""
    for path in folder.glob(f"*{MARK}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, would outlive a power failure.  Raises NotWrittenError."""
    with _naming(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error inside is said in a line that names the path: the system's own seldom does, and safetensors, tokenizers
    and torch.save have one of their own kind each."""
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


def strict_json(value: Any, **options: Any) -> str:
    """As text: NaN and infinities become null, tensors and numpy scalars numbers."""
    return json.dumps(_plain(value), allow_nan=False, ensure_ascii=False, **options)


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line for each row."""
    return "".join(strict_json(row) + "\n" for row in rows)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # torch tensors and numpy arrays and scalars
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def load(text: str, where: str) -> Any:
    """The content.  Raises ValueError beginning with `where`, the file's name."""
    try:
        for node in _mappings(yaml.compose(text, yaml.SafeLoader)):
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{', '.join(twice)}: given twice, line {node.start_mark.line + 1} and after")
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{where}: {' '.join(f'{error}'.split())}") from error


def _mappings(node: yaml.Node | None, seen: frozenset[int] = frozenset()) -> Iterator[yaml.MappingNode]:
    """All in this one and itself; an alias within itself is not followed."""
    if isinstance(node, yaml.CollectionNode) and id(node) not in seen:
        if isinstance(node, yaml.MappingNode):
            yield node
        for part in node.value:
            for inner in part if isinstance(part, tuple) else (part,):
                yield from _mappings(inner, seen | {id(node)})


def sha256(file: Path) -> str:
    """Of a file's bytes, as `sha256sum` writes it."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
