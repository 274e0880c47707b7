"""YAML in which no name stands twice in one mapping; what is wrong with it is said in one line."""

from collections.abc import Iterator
from typing import Any

import yaml


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
