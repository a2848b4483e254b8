"""containers/: the image is built, holds the scripts and trains without root; Enroot's images."""

import os
import re
import subprocess

import kubernetes_lab as lab
import pytest
from scripts import ROOT, SCRIPTS

# Enroot has no Debian package: a stand-in writes the name of the image into the file. As Enroot
# does, it refuses to overwrite a file, and removes the container of podman:// with docker.
ENROOT = """#!/bin/bash
[[ $1 == import && $2 == --output && ! -e $3 ]] || exit 9
printf %s "$4" >"$3"
if [[ $4 == podman://* ]]; then
    docker rm container
fi
"""


def create_enroot_image(tmp_path, *arguments, then=""):
    """Run the script where an old image is, with a stand-in for enroot that runs `then`."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in ("enroot", ENROOT + then), ("podman", "#!/bin/sh\n"):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/pytorch.sqsh").write_text("old")
    command = ["bash", ROOT / "containers/create-enroot-image.sh", *arguments]
    done = subprocess.run(command, cwd=tmp_path / "work", capture_output=True, text=True,
                          env={"PATH": f"{tools}:{os.environ['PATH']}"})
    return done, {path.name: path.read_text() for path in (tmp_path / "work").iterdir()}


@pytest.mark.parametrize("arguments, files", [
    ([], {"pytorch.sqsh": f"docker://{lab.OFFICIAL_IMAGE}"}),
    (["podman://ddp:1", "mine.sqsh"], {"pytorch.sqsh": "old", "mine.sqsh": "podman://ddp:1"}),
])
def test_an_enroot_image_is_imported(tmp_path, arguments, files):
    done, written = create_enroot_image(tmp_path, *arguments)
    assert done.returncode == 0, f"create-enroot-image.sh failed:\n{done.stderr}"
    assert written == files, f"the folder is to hold {files}, not {written}"


@pytest.mark.parametrize("end", ["exit 1", "kill -TERM $PPID; sleep 1"])
def test_a_failed_import_keeps_the_old_enroot_image(tmp_path, end):
    done, written = create_enroot_image(tmp_path, then=end)
    assert done.returncode != 0, f"a failed import is to be an error:\n{done.stdout}"
    assert written == {"pytorch.sqsh": "old"}, f"the old image is to stay, alone: {written}"


def in_image(*command):
    """Run a command in the image, without a network. Return its output."""
    (image,) = lab.images()[lab.OUR_IMAGE]
    return lab.sh(*lab.podman_run("--rm", "--network", "none", image), *command, timeout=180)


@pytest.mark.skipif(bool(lab.missing()), reason=lab.missing())
def test_the_image_holds_the_scripts_alone_and_a_user_who_has_a_home():
    output = in_image("sh", "-c", "id -u && touch ~/writable && find . -type f | sort")
    expected = ["1001", *sorted(f"./{script}/train.py" for script in SCRIPTS)]
    assert output.split() == expected, f"user and files are to be {expected}, see .dockerignore"


@pytest.mark.skipif(bool(lab.missing()), reason=lab.missing())
def test_the_image_trains_with_two_processes():
    output = in_image()
    assert "world size 2, " in output, f"the image is to start two processes:\n{output}"
    error = re.search(r"error of a learned weight: ([\d.]+)", output)
    assert error, f"cpu_ddp did not end:\n{output}"
    assert float(error[1]) < 0.02, f"cpu_ddp did not learn the weights:\n{output}"
