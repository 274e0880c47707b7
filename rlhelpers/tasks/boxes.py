"""Where an answer stands in a response: between the answer tags of the r1 prompts, or in a box of LaTeX."""

import re
from dataclasses import dataclass

from rlhelpers.tasks.quantity import MAX_CHARS

THINK_AND_ANSWER, OPEN_TAG, CLOSE_TAG = "</think> <answer>", "<answer>", "</answer>"
_BRACE = re.compile(r"\\boxed\s*\{|(?<!\\)\\[{}]|[{}]")  # `\\{` is a brace after a line break


@dataclass(frozen=True)
class Boxes:
    """What was found.  `has_format`: the response keeps to the prompt's form.  `contents`: the beginning of
    what every closed box holds, at most MAX_CHARS characters, in order.  `opened`: how many there are, closed or not.
    `last`: all that the last one holds, None where it is not closed or there is none."""

    has_format: bool
    contents: tuple[str, ...]
    opened: int
    last: str | None


def find_tags(response: str) -> Boxes:
    """Answer tags.  The format holds when the response has `</think> <answer>` and, after it, `</answer>`."""
    pieces = [piece.partition(CLOSE_TAG) for piece in response.split(OPEN_TAG)[1:]]
    has_format = CLOSE_TAG in response.partition(THINK_AND_ANSWER)[2]
    last = pieces[-1][0] if pieces and pieces[-1][1] else None
    contents = tuple(inside[:MAX_CHARS] for inside, closed, _ in pieces if closed)
    return Boxes(has_format, contents, len(pieces), last)


def find_boxes(response: str) -> Boxes:
    r"""Boxes, `\boxed{...}` with its braces balanced.  The format holds when the last one that is opened is closed."""
    closed, open_braces = {}, []  # spans, no texts: boxes in boxes would hold the same text again and again
    for brace in _BRACE.finditer(response):
        if brace[0].startswith(r"\boxed"):
            open_braces.append(brace)
        elif brace[0] == "{":
            open_braces.append(None)
        elif brace[0] == "}" and open_braces:
            opening = open_braces.pop()
            if opening is not None:
                closed[opening.start()] = opening.end(), brace.start()
    unclosed = [opening.start() for opening in open_braces if opening is not None]
    starts = sorted([*closed, *unclosed])
    contents = tuple(response[begin : min(end, begin + MAX_CHARS)] for _, (begin, end) in sorted(closed.items()))
    has_format = bool(starts) and starts[-1] in closed
    last = response[slice(*closed[starts[-1]])] if has_format else None
    return Boxes(has_format, contents, len(starts), last)
