"""The scripts share blocks by copy, because each must stand alone: the copies stay equal, and stand alone."""

import ast
import collections
import re
import sys

import pytest
from helpers import SCRIPTS, script_path

BLOCK = re.compile(r"^# --- shared: (.+?) ---\n(.*?)^# --- end ---$", re.MULTILINE | re.DOTALL)


def compare(texts):
    """(number of comparisons, names of blocks that differ) in {script: its text}; a block without a partner differs."""
    copies = collections.defaultdict(list)
    for text in texts.values():
        found = BLOCK.findall(text)
        marks = re.findall(r"^# --- .+ ---$", text, re.MULTILINE)
        assert len(marks) == 2 * len(found) == 2 * len(dict(found)), "a block without an end, or twice"
        for name, block in found:
            copies[name].append(block)
    return (sum(len(blocks) - 1 for blocks in copies.values()),
            [name for name, blocks in copies.items() if len(set(blocks)) > 1 or len(blocks) == 1])


@pytest.fixture
def texts():
    return {script: script_path(script).read_text() for script in SCRIPTS}


def test_copies_are_equal(texts):
    comparisons, different = compare(texts)
    assert comparisons >= len(SCRIPTS) - 1, "no shared blocks were found"
    assert not different, f"the copies of these blocks are no longer equal: {different}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_changed_copy_is_found(texts, script):
    for name, block in BLOCK.findall(texts[script]):
        changed = {**texts, script: texts[script].replace(block, block.rstrip("\n") + "  \n")}
        assert compare(changed)[1] == [name]


@pytest.mark.parametrize("script", SCRIPTS)
def test_imports(texts, script):
    allowed = sys.stdlib_module_names | {"torch", "torchvision"}
    modules = set()
    for node in ast.walk(ast.parse(texts[script])):
        if isinstance(node, ast.Import):
            modules.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import reaches for a sibling file"
            modules.add(node.module.split(".")[0])
    assert "torch" in modules and modules <= allowed, modules - allowed
    assert not re.search(r"__import__|importlib|\bexec\(", texts[script])
