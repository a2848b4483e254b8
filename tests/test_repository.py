"""The repository: equal functions, imports, lines, licenses, shell files."""

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter

import pytest
from copy_functions import shared_functions
from scripts import ROOT, SCRIPTS, name_of, script_path


def tracked(*patterns):
    """Return the files under git that match one of the patterns, or all."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--", *patterns]
    names = subprocess.check_output(command, cwd=ROOT, text=True, timeout=30).split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


PYTHON_FILES = tracked("*.py")
SHELL_FILES = tracked("*.sh", "*.sbatch", ".ci/run")
LICENSED = [*tracked("*/train.py"), *SHELL_FILES, *tracked("*.yaml", "*.yaml-template")]


def test_each_script_is_declared_and_has_what_belongs_to_it():
    """tests/README.md has the recipe."""
    missing = [f"a row for {path.parent.name} in SCRIPTS (tests/scripts.py)"
               for path in tracked("*/train.py") if path.parent.name not in SCRIPTS]
    sbatch = "".join(path.read_text() for path in tracked("slurm/*.sbatch"))
    for script in SCRIPTS:
        name = f"{script}/train.py"
        places = {
            f"the script {name}": (ROOT / name).exists(),
            f"a page {script}/README.md": (ROOT / script / "README.md").exists(),
            f"{script}/README.md in README.md": f"{script}/README.md" in (
                ROOT / "README.md").read_text(),
            f"a file slurm/*.sbatch with {name}": name in sbatch,
            f"the line !{name} in .dockerignore": f"!{name}\n" in (
                ROOT / ".dockerignore").read_text(),
        }
        missing += [place for place, found in places.items() if not found]
    assert not missing, f"a script is missing: {'; '.join(missing)}"


def test_the_top_level():
    names = {path.relative_to(ROOT).parts[0] for path in tracked()}
    names = {name for name in names if not name.startswith(".")}
    expected = {*SCRIPTS, "slurm", "containers", "tests", "README.md"}
    assert names == expected, (
        f"at the top are {sorted(names - expected)} too many, {sorted(expected - names)} missing")


# ---- shared functions ----
def test_functions_of_the_same_name_are_equal():
    """But for those that a copy edits: EDITED and EDITED_IN in tests/copy_functions.py."""
    first = {}
    different = []
    for script in SCRIPTS:
        for name, text in shared_functions(script_path(script)).items():
            other, other_text = first.setdefault(name, (script, text))
            if text != other_text:
                different.append(f"{name}() of {script} and of {other}")
    assert not different, (
        f"functions of the same name differ, see tests/copy_functions.py: {', '.join(different)}")


# ---- Python files ----
def test_imports():
    """The standard library, torch, torchvision. Pillow where image files are read or made."""
    for path in PYTHON_FILES:
        allowed = sys.stdlib_module_names | {"torch", "torchvision"}
        if path.parent.name == "tests":
            allowed |= {"pytest", "PIL", *[other.stem for other in path.parent.glob("*.py")]}
        elif "read_image" in path.read_text():
            allowed |= {"PIL"}
        packages = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                packages |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                packages.add((node.module or ".").split(".")[0])
        assert packages <= allowed, f"{name_of(path)} imports {sorted(packages - allowed)}"


def test_one_statement_a_line():
    """And no expression for its side effect."""
    effects = (ast.Call, ast.Constant, ast.Yield, ast.YieldFrom)
    for path in PYTHON_FILES:
        statements = [node for node in ast.walk(ast.parse(path.read_text()))
                      if isinstance(node, ast.stmt)]
        counts = Counter(node.lineno for node in statements)
        several = [line for line, count in counts.items() if count > 1]
        assert not several, f"{name_of(path)} has several statements in lines {several}"
        others = [node.lineno for node in statements
                  if isinstance(node, ast.Expr) and not isinstance(node.value, effects)]
        assert not others, f"{name_of(path)} has expressions for their side effect: lines {others}"


def test_lines_have_at_most_100_characters():
    """Of pages, but for blocks of code (output of programs), tables and addresses."""
    found = []
    for path in [*PYTHON_FILES, *SHELL_FILES, *tracked("*.md")]:
        text = path.read_text()
        if path.suffix == ".md":
            text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
            text = re.sub(r"^ *\|.*|.*://.*", "", text, flags=re.MULTILINE)
        found += [f"{name_of(path)}: {line}" for line in text.splitlines() if len(line) > 100]
    assert not found, f"lines of more than 100 characters: {found}"


# ---- shell files, licenses, registries ----
@pytest.mark.parametrize("path", SHELL_FILES, ids=name_of)
def test_shell_files(path):
    """Without shellcheck (a Debian package), only the syntax is tested."""
    assert "\nset -euo pipefail\n" in path.read_text(), f"{name_of(path)}: no set -euo pipefail"
    command = ["shellcheck", "-x", path] if shutil.which("shellcheck") else ["bash", "-n", path]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, f"{command[0]} {name_of(path)}:\n{result.stdout}{result.stderr}"


def test_license_lines():
    """What is there to be copied says so itself: scripts, sbatch and shell files, manifests."""
    missing = [name_of(path) for path in LICENSED
               if "# SPDX-License-Identifier: MIT-0" not in path.read_text().splitlines()[:5]]
    assert not missing, f"no '# SPDX-License-Identifier: MIT-0' in the first lines of {missing}"


def test_no_file_names_a_package_registry():
    """Where packages come from is the user's choice. The pattern does not match itself."""
    hosts = re.compile(r"(pypi|pythonhosted|download\.pytorch|anaconda|deb\.debian)\.(org|com)"
                       r"|archive\.ubuntu\.com")
    found = [name_of(path) for path in tracked() if hosts.search(path.read_text(errors="replace"))]
    assert not found, f"files name the host of a package registry: {found}"
