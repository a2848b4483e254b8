#!/usr/bin/env python3
"""Copy the shared blocks of one script into all other scripts that have blocks of the same name.

usage: python tests/copy_blocks.py SCRIPT        for example fashionmnist_ddp

A shared block stands between "# --- shared: NAME ---" and "# --- end ---". Edit it in one script,
then run this. tests/test_repository.py fails while two copies differ.
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^# --- shared: ([\w ]+) ---\n.*?^# --- end ---$", re.MULTILINE | re.DOTALL)


def shared_blocks(text):
    """Return the shared blocks of a script's text, by name, with their first and last lines."""
    return {match[1]: match[0] for match in BLOCK.finditer(text)}


def copy_blocks(source, target):
    """Replace the shared blocks in the file target by those of the file source."""
    blocks = shared_blocks(source.read_text())
    old = target.read_text()
    new = BLOCK.sub(lambda match: blocks.get(match[1], match[0]), old)
    if new != old:
        target.write_text(new)
        print(f"{target.relative_to(ROOT)} has been updated")


def main():
    source = ROOT / sys.argv[1].strip("/") / "train.py" if len(sys.argv) == 2 else None
    if source is None or not source.exists():
        sys.exit("usage: python tests/copy_blocks.py SCRIPT")
    for target in sorted(ROOT.glob("*/train.py")):
        if target != source:
            copy_blocks(source, target)


if __name__ == "__main__":
    main()
