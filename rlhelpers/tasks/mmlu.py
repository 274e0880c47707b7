"""MMLU (arXiv:2009.03300): 14,042 questions of 57 subjects, each with four choices."""

from pathlib import Path

from rlhelpers.tasks.data_files import read_csv
from rlhelpers.tasks.example import Example

LETTERS = "ABCD"
SUFFIX = "_test.csv"
COLUMNS = "question, four choices, and the letter of the right one"


def read_mmlu(folder: Path) -> list[Example]:
    """The test questions of a folder with files `<subject>_test.csv`, or with a folder `test` that holds them, subjects
    in alphabetical order.  A file has no header; a row is the question, four choices, and the letter of the right one.
    A choice may be empty.  Raises ValueError naming file and line for any other row.
    """
    where = folder / "test" if (folder / "test").is_dir() else folder
    files = sorted(where.glob(f"*{SUFFIX}"))
    if not files:
        raise FileNotFoundError(
            f"data: got {str(folder)!r}; it has no files <subject>{SUFFIX}, nor has its folder test"
        )
    return [_example(file, line, row) for file in files for line, row in read_csv(file)]


def _example(file: Path, line: int, row: list[str]) -> Example:
    if len(row) != 2 + len(LETTERS):
        raise ValueError(f"{file}, line {line}: got {len(row)} columns; accepted are {2 + len(LETTERS)}: {COLUMNS}")
    question, *choices, answer = (cell.strip() for cell in row)
    if not question:
        raise ValueError(f"{file}, line {line}: the question is empty; accepted are {COLUMNS}")
    if answer not in tuple(LETTERS):
        raise ValueError(f"{file}, line {line}: got the answer {answer!r}; accepted is one of A, B, C and D")
    subject = file.name.removesuffix(SUFFIX).replace("_", " ")
    fields = {"subject": subject, "question": question, "choices": choices}
    return Example(fields, ask(subject, question, choices), answer)


def ask(subject: str, question: str, choices: list[str]) -> str:
    """The instruction, in the words of the supplement of the handout, section 2.1: they fix the form of the answer that
    is parsed."""
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
    return (
        f"Answer the following multiple choice question about {subject}. Respond with a single sentence of the form "
        '"The correct answer is _", filling the blank with the letter corresponding to the correct answer '
        f"(i.e., A, B, C or D).\n\nQuestion: {question}\n{listed}\nAnswer:"
    )
