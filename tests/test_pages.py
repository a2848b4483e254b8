"""Pages: links lead somewhere, commands are valid, samples are what commands print."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from copies import make_copy
from launchers import Job, clean_environment, run
from scripts import ROOT, SCRIPTS, STEP_SCRIPTS, code_blocks, load_script, name_of
from torch.distributed.run import get_args_parser

PAGES = sorted([ROOT / "README.md", *ROOT.glob("*/*.md")])


# ---- links ----
def anchors(path):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_to_files_and_headings_exist(path):
    code = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", code.sub("", path.read_text())):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or anchor and anchor not in anchors(target):
            broken.append(link)
    assert not broken, f"{name_of(path)} has links to no file or heading: {broken}"


# ---- commands and samples ----
def commands(blocks):
    """Return the commands in these blocks of code: one a line, without comments."""
    text = "".join(blocks).replace("\\\n", " ")
    return [line for line in re.sub(r"(^|\s)#.*", "", text).splitlines() if line.strip()]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_are_valid(path):
    """Shell syntax, flags of torchrun and of the scripts, files."""
    blocks = code_blocks(path, "bash")
    for block in blocks:
        process = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert process.returncode == 0, f"{path}: no shell syntax:\n{block}{process.stderr}"
    for command in commands(blocks):
        for file in re.findall(r"(?<![\w/.:=])(?:slurm|tests|containers|\w+_dp|\w+_ddp)/[\w./-]+\w",
                               command):
            assert (ROOT / file).exists(), f"{path}: no file {file}, in\n{command}"
        script = re.search(r"\b(\w+_ddp|mnist_dp)/train\.py|slurm/(\w+)[\w-]*\.sbatch", command)
        if not script or "SCRIPT=" in command or "configmap" in command or "cp " in command:
            continue
        name = script[1] or next(name for name in SCRIPTS if name.startswith(f"{script[2]}_"))
        before, after = command[:script.start()], command[script.end():]
        flags = shlex.split(re.sub(r" \.\.\.| (2>&1|&|>\S+).*", "", after))
        load_script(name).parse_args(flags)  # ends with an error if it does not know a flag
        if "torchrun" in before:
            words = shlex.split(before[before.index("torchrun") + 8:])
            if words and "..." not in words:
                get_args_parser().parse_args([*words, "train.py"])


def results(line):
    """Return the losses and accuracies of a line by their names."""
    return {name: float(number) for name, number in
            re.findall(r"(\w*(?:loss|accuracy)) ([\d.]+)", line)}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_command_prints_what_its_page_shows(script):
    """The first line is exact, results nearly so: CPUs round differently.

    Of cifar10_ddp, whose epochs take long, the first epoch.
    """
    page = ROOT / script / "README.md"
    content = page.read_text()
    shown = re.search(r"^```\n((?:world size|GPUs) .*?)^```$", content,
                      re.MULTILINE | re.DOTALL)[1]
    epochs = re.findall(r"^(epoch \d+/\d+  )(?!step)(.*)", shown, re.MULTILINE)
    epochs = epochs[:1] if script in STEP_SCRIPTS else epochs
    place, command = re.search(r"\bThe (first|second|last) command\b|^`(python .*?)`", content,
                               re.MULTILINE).groups()
    if place:  # in the page's first block
        number = {"first": 0, "second": 1, "last": -1}[place]
        command = commands(code_blocks(page, "bash")[:1])[number]
    env = clean_environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    with Job(["bash", "-c", command], env, ROOT) as job:
        job.wait_for(f"^{epochs[-1][0]}(?!step).*\n")
        text = job.text

    def first_line(text):
        line = re.search(r"^(?:world size|GPUs) .*", text, re.MULTILINE)[0]
        return re.sub(r"(threads|torch) \S+", r"\1", line)

    assert first_line(text) == first_line(shown), f"{page} shows another first line"
    for epoch, expected in epochs:
        found = re.search(f"^{epoch}(?!step).*", text, re.MULTILINE)[0]
        assert results(found) == pytest.approx(results(expected), rel=0.1, abs=0.02), (
            f"{page} shows\n{epoch}{expected}\nbut {command} prints\n{text}")


@pytest.mark.slow
def test_a_process_that_hangs_prints_the_lines_that_the_readme_shows(tmp_path):
    def functions(text):
        """Return the functions that each process prints, the innermost first."""
        traces = re.findall(r"^Current thread .*\n((?:  .*\n)+)", text, re.MULTILINE)
        return [re.findall(r"line \d+ in (\w+)$", trace, re.MULTILINE) for trace in traces]

    (shown,) = re.findall(r"^```\n(Current thread .*?)^```$", (ROOT / "README.md").read_text(),
                          re.MULTILINE | re.DOTALL)
    copy = make_copy("synthetic_ddp", tmp_path / "my.py", ("", """
def my_tokenizer():
    if dist.get_rank() == 1:
        time.sleep(1000)
"""), ('before "with torch.autocast("', "my_tokenizer()"))
    status, text = run(copy, "--timeout", 30, launcher="torchrun", nproc=2)
    assert status and re.search(r"Root Cause .*\n\[0\]:", text), f"another failure:\n{text}"
    for expected in functions(shown):
        assert any(set(expected) <= set(found) and found.index(expected[0]) <= 2
                   for found in functions(text)), (
            f"no process prints that it is in {expected}, as README.md shows:\n{text}")
