"""The repository: equal functions, imports, lines, licenses, shell files, links, diagrams."""

import ast
import re
import shutil
import subprocess
import sys

import pytest
from copy_functions import shared_functions
from scripts import ROOT, SCRIPTS, script_path

FOLDERS = {"slurm", "containers", "tests"}


def tracked(*patterns):
    """Return the files under git that match one of the patterns, or all."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--", *patterns]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True,
                            timeout=30)
    paths = [ROOT / name for name in result.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def name_of(path):
    """Return a path below the top of the repository: the name of a test's case."""
    return str(path.relative_to(ROOT))


PYTHON_FILES = tracked("*.py")
SHELL_FILES = tracked("*.sh", "*.sbatch", ".ci/run")
MANIFESTS = tracked("*.yaml", "*.yaml-template")
PAGES = tracked("*.md")


def test_the_top_level():
    """One folder for each script, and slurm, containers, tests, README.md."""
    names = {path.relative_to(ROOT).parts[0] for path in tracked()}
    names = {name for name in names if not name.startswith(".")}
    expected = {*SCRIPTS, *FOLDERS, "README.md"}
    assert names == expected, (
        f"at the top are {sorted(names - expected)} too many, {sorted(expected - names)} missing: "
        "a new script is added in tests/scripts.py")


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
        "functions of the same name differ: copy them from the script that is right by python "
        "tests/copy_functions.py SCRIPT\n" + "\n".join(different))


def test_copy_functions_copies_an_edited_function(tmp_path):
    for script in SCRIPTS:
        (tmp_path / script).mkdir()
        shutil.copy(script_path(script), tmp_path / script)
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "copy_functions.py", tmp_path / "tests")
    source = tmp_path / "synthetic_ddp" / "train.py"
    source.write_text(source.read_text().replace("    model.eval()\n", "    model.eval()  # new\n"))
    result = subprocess.run([sys.executable, "tests/copy_functions.py", "synthetic_ddp"],
                            cwd=tmp_path, capture_output=True, text=True, timeout=60)
    updated = [script for script in SCRIPTS
               if "model.eval()  # new\n" in (tmp_path / script / "train.py").read_text()]
    assert updated == ["cifar10_ddp", "fashionmnist_ddp", "synthetic_ddp"], (
        "evaluate() of synthetic_ddp was edited: copy_functions.py must copy it into cifar10_ddp "
        f"and fashionmnist_ddp, but not into mnist_dp's other one; it is in {updated}\n"
        f"{result.stdout}{result.stderr}")


# ---- Python files ----
@pytest.mark.parametrize("path", PYTHON_FILES, ids=name_of)
def test_imports(path):
    """The standard library, torch, torchvision. Pillow where image files are read or made."""
    allowed = sys.stdlib_module_names | {"torch", "torchvision"}
    if path.parent.name == "tests":
        allowed |= {"pytest", "PIL"}
        allowed |= {other.stem for other in path.parent.glob("*.py")}
    elif path == script_path("cifar10_ddp"):
        allowed |= {"PIL"}
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages.add((node.module or ".").split(".")[0])
    assert packages <= allowed, f"{name_of(path)} imports {sorted(packages - allowed)}"


@pytest.mark.parametrize("path", PYTHON_FILES, ids=name_of)
def test_one_statement_a_line(path):
    """And no expression for its side effect."""
    statements = [node for node in ast.walk(ast.parse(path.read_text()))
                  if isinstance(node, ast.stmt)]
    lines = [node.lineno for node in statements]
    several = {line for line in lines if lines.count(line) > 1}
    assert not several, f"{name_of(path)} has several statements in lines {sorted(several)}"
    effects = (ast.Call, ast.Constant, ast.Yield, ast.YieldFrom)
    others = [node.lineno for node in statements
              if isinstance(node, ast.Expr) and not isinstance(node.value, effects)]
    assert not others, f"{name_of(path)} evaluates an expression for its side effect: {others}"


@pytest.mark.parametrize("path", PYTHON_FILES + SHELL_FILES, ids=name_of)
def test_lines_have_at_most_100_characters(path):
    lines = path.read_text().splitlines()
    long_lines = [number for number, line in enumerate(lines, start=1) if len(line) > 100]
    assert not long_lines, f"{name_of(path)} has more than 100 characters in lines {long_lines}"


# ---- shell files, licenses, registries ----
@pytest.mark.parametrize("path", SHELL_FILES, ids=name_of)
def test_shell_files(path):
    """Without shellcheck (a Debian package), only the syntax is tested."""
    stops = re.search(r"^set -euo pipefail$", path.read_text(), re.MULTILINE)
    assert stops, f"{name_of(path)} has no line 'set -euo pipefail'"
    command = ["shellcheck", path] if shutil.which("shellcheck") else ["bash", "-n", path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, f"{command[0]} {name_of(path)}:\n{result.stdout}{result.stderr}"


LICENSED = [script_path(script) for script in SCRIPTS] + SHELL_FILES + MANIFESTS


@pytest.mark.parametrize("path", LICENSED, ids=name_of)
def test_license_line(path):
    """What is there to be copied says so itself: scripts, sbatch and shell files, manifests."""
    top = path.read_text().splitlines()[:5]
    assert "# SPDX-License-Identifier: MIT-0" in top, (
        f"{name_of(path)} needs '# SPDX-License-Identifier: MIT-0' in its first lines:\n{top}")


def test_no_file_names_a_package_registry():
    """Where packages come from is the user's choice. The pattern does not match itself."""
    hosts = re.compile(r"(pypi|pythonhosted|download\.pytorch|anaconda|deb\.debian)\.(org|com)"
                       r"|archive\.ubuntu\.com")
    found = []
    for path in tracked():
        match = hosts.search(path.read_text(errors="replace"))
        if match:
            found.append(f"{name_of(path)}: {match[0]}")
    assert not found, "a file names the host of a package registry:\n" + "\n".join(found)


# ---- pages ----
def without_blocks(path):
    """Return Markdown without its code blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
            for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_to_files_and_headings_exist(path):
    broken = []
    text = re.sub(r"`[^`\n]*`", "", without_blocks(path))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):  # another website
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or anchor and anchor not in anchors(target):
            broken.append(link)
    assert not broken, f"{name_of(path)} has links to no file or heading: {broken}"


NODE = r'\w+(\["[^"]*"\])?'
NUMBER = r"\d+(?:\.\d+)?"
MERMAID = {  # a diagram's first line, and the forms of its others
    r"flowchart (LR|TB)": rf'subgraph {NODE}|end|{NODE}( --> {NODE})*',
    r"xychart-beta": rf'title "[^"]*"|[xy]-axis "[^"]*" {NUMBER} --> {NUMBER}'
                     rf"|line \[{NUMBER}(, ?{NUMBER})*\]",
}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_diagrams_are_plain_mermaid(path):
    """GitHub shows an error in place of a diagram with an unknown line."""
    for diagram in re.findall(r"^```mermaid\n(.*?)^```$", path.read_text(),
                              re.MULTILINE | re.DOTALL):
        first, *lines = [line.strip() for line in diagram.splitlines()]
        forms = [form for kind, form in MERMAID.items() if re.fullmatch(kind, first)]
        assert forms, f"{name_of(path)}: unknown Mermaid diagram {first!r}"
        unknown = [line for line in lines if not re.fullmatch(forms[0], line)]
        assert not unknown, f"{name_of(path)}: lines that Mermaid may not understand: {unknown}"
        begins = diagram.count("subgraph ")
        assert lines.count("end") == begins, f"{name_of(path)}: a subgraph has no end:\n{diagram}"
