"""The repository: equal copies, imports, lines, shell files, links.

Shared blocks stand between "# --- shared: NAME ---" and "# --- end ---" in each script.
tests/copy_blocks.py copies them.
"""

import ast
import re
import shutil
import subprocess
import sys

import pytest
from copy_blocks import shared_blocks
from scripts import DDP_SCRIPTS, IMAGE_SCRIPTS, ROOT, SCRIPTS, TESTED_SCRIPTS, script_path

LONGEST_LINE = 100
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
PAGES = tracked("*.md")


# ---- what there is ----
def test_the_top_level():
    """One folder for each script, and slurm, containers, tests, README.md."""
    names = {path.relative_to(ROOT).parts[0] for path in tracked()}
    names = {name for name in names if not name.startswith(".")}
    expected = {*SCRIPTS, *FOLDERS, "README.md"}
    assert names == expected, (
        f"at the top are {sorted(names - expected)} too many, {sorted(expected - names)} missing: "
        "a new script is added in tests/scripts.py")


# ---- shared blocks ----
SCRIPTS_OF_BLOCK = {
    "helpers": list(SCRIPTS),
    "processes": DDP_SCRIPTS,
    "images": IMAGE_SCRIPTS,
    "GPUs and evaluation": [name for name in DDP_SCRIPTS if name in TESTED_SCRIPTS],
}
COPIES = []
for block, scripts in SCRIPTS_OF_BLOCK.items():
    for script in scripts:
        COPIES.append((block, script))


def blocks_of(script):
    return shared_blocks(script_path(script).read_text())


@pytest.mark.parametrize("block, script", COPIES)
def test_shared_block_is_equal_in_all_scripts(block, script):
    copies = [blocks_of(name).get(block) for name in SCRIPTS_OF_BLOCK[block]]
    commonest = max(copies, key=copies.count)
    mine = blocks_of(script).get(block)
    assert mine is not None, f"{script} has no block '# --- shared: {block} ---'"
    if mine != commonest:
        raise AssertionError(
            f"block {block!r} differs in {script}: copy it with python tests/copy_blocks.py SCRIPT,"
            f" where SCRIPT is the one that is right. In {script}, and in most others:\n"
            + difference_of_lines(mine, commonest))


def difference_of_lines(one, other):
    """Return the lines that only one of two texts has, with - and +."""
    one = one.splitlines()
    other = other.splitlines()
    lines = [f"- {line}" for line in one if line not in other]
    lines += [f"+ {line}" for line in other if line not in one]
    return "\n".join(lines) or "the same lines in another order"


@pytest.mark.parametrize("script", SCRIPTS)
def test_all_marked_blocks_are_compared(script):
    names = re.findall(r"^# --- shared: (.*) ---$", script_path(script).read_text(), re.MULTILINE)
    expected = [block for block, scripts in SCRIPTS_OF_BLOCK.items() if script in scripts]
    assert sorted(names) == sorted(expected), (
        f"{script} has the shared blocks {names}, not {expected}: see SCRIPTS_OF_BLOCK")
    ends = script_path(script).read_text().count("\n# --- end ---\n")
    assert ends == len(names), f"{script} has {len(names)} shared blocks, but {ends} ends"


@pytest.fixture
def copied_scripts(tmp_path):
    """A copy of the scripts and of copy_blocks.py, in which one block of cpu_ddp was edited."""
    for script in SCRIPTS:
        (tmp_path / script).mkdir()
        shutil.copy(script_path(script), tmp_path / script)
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "copy_blocks.py", tmp_path / "tests")
    path = tmp_path / "cpu_ddp" / "train.py"
    path.write_text(path.read_text().replace("def check_finite(", "def check_all_finite("))
    return tmp_path


def test_copy_blocks_copies_an_edited_block(copied_scripts):
    command = [sys.executable, "tests/copy_blocks.py", "cpu_ddp"]
    result = subprocess.run(command, cwd=copied_scripts, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, f"copy_blocks.py has failed:\n{result.stderr}"
    for script in SCRIPTS:
        text = (copied_scripts / script / "train.py").read_text()
        assert "def check_all_finite(" in text, (
            f"copy_blocks.py has not copied cpu_ddp's block 'helpers' into {script}:\n"
            f"{result.stdout}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_line_that_tests_replace(script):
    """Several tests put code behind it, to wait or to compare in a certain step."""
    count = script_path(script).read_text().count("\n            step += 1\n")
    assert count == 1, f"{script} has the line '            step += 1' {count} times, not once"


# ---- Python files ----
@pytest.mark.parametrize("path", PYTHON_FILES, ids=name_of)
def test_imports(path):
    """The standard library, torch and torchvision; in tests also pytest and each other."""
    allowed = sys.stdlib_module_names | {"torch", "torchvision"}
    if path.parent.name == "tests":
        allowed |= {"pytest"}
        allowed |= {other.stem for other in path.parent.glob("*.py")}
    unknown = imported_packages(path) - allowed
    assert not unknown, f"{name_of(path)} imports {sorted(unknown)}: only torch and torchvision"


def imported_packages(path):
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages.add((node.module or ".").split(".")[0])
    return packages


@pytest.mark.parametrize("path", PYTHON_FILES, ids=name_of)
def test_one_statement_a_line(path):
    lines = [node.lineno for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.stmt)]
    shared = sorted({line for line in lines if lines.count(line) > 1})
    assert not shared, f"{name_of(path)} has several statements in lines {shared}"


@pytest.mark.parametrize("path", PYTHON_FILES, ids=name_of)
def test_no_expression_is_evaluated_for_its_side_effect(path):
    """Nor does a lambda return a tuple for the effect of an item."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr):
            if not isinstance(node.value, (ast.Call, ast.Constant, ast.Yield, ast.YieldFrom)):
                lines.append(node.lineno)
        elif isinstance(node, ast.Lambda) and isinstance(node.body, ast.Tuple):
            lines.append(node.lineno)
    assert not lines, f"{name_of(path)} evaluates an expression for its side effect: lines {lines}"


@pytest.mark.parametrize("path", PYTHON_FILES + SHELL_FILES, ids=name_of)
def test_lines_have_at_most_100_characters(path):
    long_lines = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if len(line) > LONGEST_LINE:
            long_lines.append(number)
    assert not long_lines, f"{name_of(path)} has more than 100 characters in lines {long_lines}"


# ---- shell files ----
@pytest.mark.parametrize("path", SHELL_FILES, ids=name_of)
def test_shell_syntax(path):
    result = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=30)
    assert result.stderr == "", f"{name_of(path)} is no valid bash:\n{result.stderr}"


@pytest.mark.parametrize("path", SHELL_FILES, ids=name_of)
def test_shell_file_stops_at_the_first_error(path):
    found = re.search(r"^set -euo pipefail$", path.read_text(), re.MULTILINE)
    assert found, f"{name_of(path)} has no line 'set -euo pipefail'"


@pytest.mark.parametrize("path", SHELL_FILES, ids=name_of)
def test_shellcheck(path):
    """Without shellcheck (a Debian package), only the syntax is tested."""
    if shutil.which("shellcheck"):
        result = subprocess.run(["shellcheck", path], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, f"shellcheck {name_of(path)}:\n{result.stdout}"


# ---- package registries ----
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
def without_code(text):
    """Return Markdown without its code blocks and inline code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(path):
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_to_files_and_headings_exist(path):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if re.match(r"\w+:", link):  # another website
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists():
            broken.append(f"{link}: there is no such file")
        elif anchor and anchor not in anchors(target):
            broken.append(f"{link}: there is no such heading")
    assert not broken, f"{name_of(path)} has broken links:\n" + "\n".join(broken)


MERMAID_TEXT = r'(\["[^"]*"\]|\("[^"]*"\)|\{"[^"]*"\}|\[[\w ,.:/+=-]*\]|\([\w ,.:/+=-]*\))?'
MERMAID_NODE = rf"\w+{MERMAID_TEXT}"
MERMAID_ARROW = r'(-->|---|-\.->|==>|<-->)(\|[^|]*\|)?'
FLOWCHART_LINES = [
    rf"{MERMAID_NODE}( & {MERMAID_NODE})*( {MERMAID_ARROW} {MERMAID_NODE}( & {MERMAID_NODE})*)*",
    r'subgraph \w+(\["[^"]*"\])?', "end", r"direction (LR|RL|TB|TD|BT)", r"%%.*",
    r"(style|classDef|class) .+",
]
SEQUENCE_LINES = [
    r"(participant|actor) \w+( as .+)?", r"\w+(->>|-->>|->|-->|-\)|-x)[+-]?\w+: .+",
    r"[Nn]ote (over|left of|right of) \w+(, ?\w+)*: .+", r"(loop|alt|opt|par|else|and|rect) .*",
    "(end|else|autonumber)", r"%%.*",
]
NUMBER = r"\d+(?:\.\d+)?"
CHART_LINES = [
    r'title "[^"]*"', rf'[xy]-axis "[^"]*" {NUMBER} --> {NUMBER}',
    rf"(line|bar) \[{NUMBER}(, ?{NUMBER})*\]", r"%%.*",
]


def mermaid_blocks():
    """Return pairs: a page, and the text of a Mermaid block in it."""
    pairs = []
    for path in PAGES:
        for text in re.findall(r"^```mermaid\n(.*?)^```$", path.read_text(),
                               re.MULTILINE | re.DOTALL):
            pairs.append((path, text))
    return pairs


@pytest.mark.parametrize("path, text", mermaid_blocks())
def test_a_diagram_is_plain_mermaid(path, text):
    """Its type is known, each of its lines has a known form, and each subgraph or loop ends."""
    first, *lines = [line.strip() for line in text.splitlines() if line.strip()]
    if re.fullmatch(r"(flowchart|graph) (LR|RL|TB|TD|BT)", first):
        forms = FLOWCHART_LINES
    elif first == "xychart-beta":
        forms = CHART_LINES
    else:
        forms = SEQUENCE_LINES
        assert first == "sequenceDiagram", f"{name_of(path)}: unknown Mermaid diagram {first!r}"
    for line in lines:
        known = any(re.fullmatch(form, line) for form in forms)
        assert known, f"{name_of(path)}: a line that Mermaid may not understand: {line!r}"
    begins = [line for line in lines if re.match(r"(subgraph|loop|alt|opt|par|rect)\b", line)]
    ends = lines.count("end")
    assert ends == len(begins), (
        f"{name_of(path)}: a Mermaid diagram begins {len(begins)} blocks and ends {ends}:\n{text}")


CHARTS = [(path, text) for path, text in mermaid_blocks() if text.startswith("xychart-beta")]


@pytest.mark.parametrize("path, text", CHARTS)
def test_a_chart_has_a_point_for_each_epoch_inside_its_axes(path, text):
    axes = {}
    for axis, low, high in re.findall(rf'([xy])-axis ".*" ({NUMBER}) --> ({NUMBER})', text):
        axes[axis] = (float(low), float(high))
    values = [float(value) for value in re.search(r"line \[(.*)\]", text)[1].split(",")]
    first, last = axes["x"]
    assert len(values) == last - first + 1, (
        f"{name_of(path)}: a chart has {len(values)} points for epochs {first:.0f} to {last:.0f}")
    low, high = axes["y"]
    outside = [value for value in values if not low <= value <= high]
    assert not outside, f"{name_of(path)}: a chart's axis {low} to {high} does not show {outside}"
