"""Copies of a script, edited as a user edits them."""

import ast
import re
import textwrap
from pathlib import Path

from scripts import script_path


def make_copy(script, path, *edits):
    """Write an edited copy of a script to path, and return path.

    An edit is a pair (place, code). place is 'before "TEXT"', 'after "TEXT"' or 'instead of
    "TEXT"', of the only statement with a line that has TEXT. Without a place, code stands above
    train(), where its definitions replace those of the same name.
    """
    text = script_path(script).read_text()
    for place, code in edits:
        code = textwrap.dedent(code).strip("\n") + "\n"
        text = edit(text, place or 'before "def train(args):"', code)
    Path(path).write_text(text)
    return path


def edit(text, place, code):
    how, words = re.fullmatch(r'(before|after|instead of) "(.*)"', place).groups()
    lines = text.splitlines(keepends=True)
    numbers = [number for number, line in enumerate(lines, 1) if words in line]
    assert len(numbers) == 1, f"an edit is {place}, but lines {numbers} of the script have it"
    around = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)
              and node.lineno <= numbers[0] <= node.end_lineno]
    node = max(around, key=lambda node: node.lineno)
    first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])]) - 1
    last = node.end_lineno
    replaced = {"before": slice(first, first), "after": slice(last, last),
                "instead of": slice(first, last)}
    lines[replaced[how]] = textwrap.indent(code, node.col_offset * " ")
    return "".join(lines)
