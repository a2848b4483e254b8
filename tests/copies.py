"""Copies of a script for one's own model and data: edited above train() only, as a user does it."""

import ast
import difflib
from pathlib import Path

from scripts import script_path

FIRST = "# ---- A copy edits the code from here to train()"
LAST = "# ---- A copy needs no edits below."


def definitions(text):
    """Return the assignments, functions and classes at the top level: {name: their text}."""
    lines = text.splitlines(keepends=True)
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            name = node.targets[0].id
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = node.name
        else:
            continue
        found[name] = "".join(lines[node.lineno - 1:node.end_lineno])
    return found


def split_script(script):
    """Return what is above, what a copy edits, and what is below, as texts."""
    text = script_path(script).read_text()
    for comment in (FIRST, LAST):
        count = text.count(comment)
        assert count == 1, f"{script} has {count} comments that begin with {comment!r}"
    above, rest = text.split(FIRST)
    comment, rest = rest.split("\n", 1)
    edited, below = rest.split(LAST)
    return above + FIRST + comment + "\n", edited, LAST + below


def make_copy(script, edits, unused, path):
    """Write a copy of a script to path. edits: a file of functions that replace the script's.

    A definition that the script lacks is put before build_model; those named in unused go.
    """
    above, edited, below = split_script(script)
    replaced = definitions(edited)
    for name, text in definitions(Path(edits).read_text()).items():
        if name in replaced:
            edited = edited.replace(replaced[name], text)
        else:
            edited = edited.replace("def build_model(", f"{text}\n\ndef build_model(")
    for name in unused:
        edited = edited.replace(replaced[name] + "\n\n", "")
    Path(path).write_text(above + edited + below)


def changed_lines(script, copy):
    """Return how many lines of the copy are new, and how many of the script are gone."""
    new = 0
    gone = 0
    original = script_path(script).read_text().splitlines()
    for line in difflib.ndiff(original, Path(copy).read_text().splitlines()):
        new += line.startswith("+ ")
        gone += line.startswith("- ")
    return new, gone
