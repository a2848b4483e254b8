# SPDX-License-Identifier: MIT-0
"""Copy the shared functions of one script into the other scripts that have them.

usage: python tests/copy_functions.py SCRIPT        for example fashionmnist_ddp

Edit a function that several scripts have in one of them, then run this. test_repository.py fails
while two copies differ.
"""
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Different in each script: what a copy edits, and the first line of the log
EDITED = {"parse_args", "prepare_data", "load_data", "scale", "augment", "build_loaders",
          "own_batches", "CNN", "build_model", "build_optimizer", "loss_of", "loss_and_counts",
          "train_epoch", "train", "log_start", "main"}
# Different in these scripts alone
EDITED_IN = {"mnist_dp": {"evaluate"}, "synthetic_ddp": {"evaluate"}, "cpu_ddp": {"form_group"},
             "cifar10_ddp": {"Sums", "log", "log_results"}}


def shared_functions(path):
    """Return the functions and classes of a script but for those that it edits: {name: text}."""
    lines = path.read_text().splitlines(keepends=True)
    edited = EDITED | EDITED_IN.get(path.parent.name, set())
    found = {}
    for node in ast.parse("".join(lines)).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in edited:
            first = min(part.lineno for part in [node, *node.decorator_list])
            found[node.name] = "".join(lines[first - 1:node.end_lineno])
    return found


def main():
    functions = shared_functions(ROOT / sys.argv[1] / "train.py")
    for target in ROOT.glob("*/train.py"):
        text = target.read_text()
        for name, old in shared_functions(target).items():
            text = text.replace(old, functions.get(name, old))
        if text != target.read_text():
            target.write_text(text)
            print(f"{target.relative_to(ROOT)} has been updated")


if __name__ == "__main__":
    main()
