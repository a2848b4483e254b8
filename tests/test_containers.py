"""containers/: the image is built, holds the scripts and trains without root; Enroot's images."""

import os
import re
import subprocess

import kubernetes_lab as lab
import pytest
from scripts import ROOT, SCRIPTS

# --- create-enroot-image.sh ---
# Enroot has no Debian package: a stand-in writes the name of the image into the file. As Enroot
# does, it refuses to overwrite a file, and removes the container of podman:// with docker.
ENROOT = """#!/bin/bash
if [[ $1 != import || $2 != --output || -e $3 ]]; then
    echo "the stand-in does not know: enroot $*" >&2
    exit 9
fi
printf %s "$4" >"$3"
if [[ $4 == podman://* ]]; then
    docker rm container
fi
"""
PODMAN = """#!/bin/sh
exit 0
"""


def write_tool(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def create_enroot_image(tmp_path, *arguments, then=""):
    """Run the script in tmp_path/work with a stand-in for enroot, which runs `then` at its end."""
    tools = tmp_path / "bin"
    write_tool(tools / "enroot", ENROOT + then)
    write_tool(tools / "podman", PODMAN)
    (tmp_path / "work").mkdir(exist_ok=True)
    command = ["bash", ROOT / "containers/create-enroot-image.sh", *arguments]
    return subprocess.run(command, cwd=tmp_path / "work", capture_output=True, text=True,
                          env={"PATH": f"{tools}:{os.environ['PATH']}"})


@pytest.mark.parametrize("arguments, file, image", [
    ([], "pytorch.sqsh", f"docker://{lab.OFFICIAL_IMAGE}"),
    (["podman://ddp:1", "mine.sqsh"], "mine.sqsh", "podman://ddp:1"),
])
def test_an_enroot_image_is_imported(tmp_path, arguments, file, image):
    (tmp_path / "work").mkdir()
    output = tmp_path / "work" / file
    output.write_text("old")
    done = create_enroot_image(tmp_path, *arguments)
    assert done.returncode == 0, f"create-enroot-image.sh failed:\n{done.stderr}"
    imported = output.read_text()
    assert imported == image, f"{file} is to be made from {image}, not from {imported}"
    files = os.listdir(tmp_path / "work")
    assert files == [file], f"create-enroot-image.sh is to write {file} only, not {files}"


@pytest.mark.parametrize("end", ["exit 1", "kill -TERM $PPID; sleep 1"])
def test_a_failed_import_keeps_the_old_enroot_image(tmp_path, end):
    (tmp_path / "work").mkdir()
    output = tmp_path / "work/pytorch.sqsh"
    output.write_text("old")
    done = create_enroot_image(tmp_path, then=end)
    assert done.returncode != 0, f"a failed import is to be an error:\n{done.stdout}"
    assert output.read_text() == "old", "a failed import is to keep the old image"
    files = os.listdir(tmp_path / "work")
    assert files == ["pytorch.sqsh"], f"a failed import is to leave no partial image: {files}"


# --- Dockerfile ---
@pytest.fixture(scope="module")
def in_image():
    """Return a function that runs a command in the image, without a network."""
    if lab.missing():
        pytest.skip(lab.missing())
    (image,) = lab.images()[lab.OUR_IMAGE]

    def run(*command):
        return lab.sh(*lab.podman_run("--rm", "--network", "none", image), *command, timeout=180)

    return run


def test_the_image_holds_the_scripts_and_nothing_else(in_image):
    files = sorted(in_image("find", ".", "-type", "f").split())
    expected = sorted(f"./{script}/train.py" for script in SCRIPTS)
    assert files == expected, f"/workspace is to hold {expected}: see .dockerignore. It has {files}"


def test_the_image_runs_as_user_1001_who_has_a_home(in_image):
    user = in_image("sh", "-c", "touch ~/writable && id -u").strip()
    assert user == "1001", f"pods run as user 1001, the image as {user}"


def test_the_image_trains_with_two_processes(in_image):
    output = in_image()
    assert "world size 2 " in output, f"the image is to start two processes:\n{output}"
    error = re.search(r"error of a learned weight: ([\d.]+)", output)
    assert error, f"cpu_ddp did not end:\n{output}"
    assert float(error[1]) < 0.02, f"cpu_ddp did not learn the weights:\n{output}"
