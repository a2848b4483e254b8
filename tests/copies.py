"""Copies of a script, made as a user makes them: functions and lines are replaced or added."""

import ast
import re
import textwrap
from pathlib import Path

from scripts import script_path


def make_copy(script, path, *edits):
    """Write an edited copy of a script to path, and return path.

    An edit is a pair (place, code). place is 'before "TEXT"', 'after "TEXT"' or 'instead of
    "TEXT"', of the only statement with a line that has TEXT. Without a place, code holds
    definitions, each of which replaces that of the same name, or is added above the flags.
    """
    text = script_path(script).read_text()
    for place, code in edits:
        code = textwrap.dedent(code).strip("\n") + "\n"
        text = edit_statement(text, place, code) if place else edit_definitions(text, code)
    Path(path).write_text(text)
    return path


def edit_statement(text, place, code):
    how, words = re.fullmatch(r'(before|after|instead of) "(.*)"', place).groups()
    lines = text.splitlines(keepends=True)
    numbers = [number for number, line in enumerate(lines, 1) if words in line]
    assert len(numbers) == 1, f"an edit is {place}, but lines {numbers} of the script have it"
    around = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)
              and node.lineno <= numbers[0] <= node.end_lineno]
    node = max(around, key=lambda node: node.lineno)
    first, last = node.lineno - 1, node.end_lineno
    replaced = {"before": slice(first, first), "after": slice(last, last),
                "instead of": slice(first, last)}
    lines[replaced[how]] = textwrap.indent(code, node.col_offset * " ")
    return "".join(lines)


def edit_definitions(text, code):
    for name, new in definitions(code).items():
        old = definitions(text).get(name)
        if old is None:
            old, new = "# ---- Flags", f"{new}\n\n# ---- Flags"
        text = text.replace(old, new)
    return text


def definitions(text):
    """Return the statements at the top level: {name of a function, class or constant: text}."""
    lines = text.splitlines(keepends=True)
    found = {}
    for node in ast.parse(text).body:
        name = getattr(node, "name", None)
        if isinstance(node, ast.Assign):
            name = node.targets[0].id
        first = min([node, *getattr(node, "decorator_list", [])], key=lambda part: part.lineno)
        code = "".join(lines[first.lineno - 1:node.end_lineno])
        found[name or code] = code
    return found
