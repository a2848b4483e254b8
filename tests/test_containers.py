"""containers/: the image is built, holds the scripts and trains without root; Enroot."""

import os
import re
import subprocess

import kubernetes_lab as lab
import pytest
from scripts import ROOT, SCRIPTS
from slurm_lab import write_program

# Enroot has no Debian package: a stand-in writes the name of the image into the file. As Enroot
# does, it refuses to overwrite a file, and removes the container of podman:// with docker.
ENROOT = """
[[ $1 == import && $2 == --output && ! -e $3 ]] || exit 9
printf %s "$4" >"$3"
[[ $4 != podman://* ]] || docker rm container
"""


@pytest.mark.parametrize("end, arguments, files", [
    ("", ["podman://ddp:1", "mine.sqsh"], {"pytorch.sqsh": "old", "mine.sqsh": "podman://ddp:1"}),
    ("kill -TERM $PPID; sleep 1", [], {"pytorch.sqsh": "old", "mine.sqsh": "old"}),
])
def test_an_enroot_image_is_imported_and_replaces_the_old_one_once_it_is_complete(
        end, arguments, files, tmp_path):
    write_program(tmp_path / "bin/enroot", ENROOT + end)
    write_program(tmp_path / "bin/podman", "true")
    work = tmp_path / "work"
    work.mkdir()
    (work / "pytorch.sqsh").write_text("old")
    (work / "mine.sqsh").write_text("old")
    command = ["bash", ROOT / "containers/create-enroot-image.sh", *arguments]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True,
                          env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    written = {path.name: path.read_text() for path in work.iterdir()}
    assert written == files, f"the folder is to hold {files}, not {written}:\n{done.stderr}"
    succeeds = not end
    assert (done.returncode == 0) == succeeds, f"exit status {done.returncode}:\n{done.stderr}"


@pytest.mark.parametrize("gpus, shown", [("", "void"), ("2", "unset")])
def test_a_container_requests_no_gpus_where_the_job_has_none(gpus, shown, tmp_path):
    """Else Enroot's hook looks for NVIDIA's tools, since the official image requests all GPUs."""
    write_program(tmp_path / "srun", 'echo "${NVIDIA_VISIBLE_DEVICES-unset}"')
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
                 "SLURM_JOB_NAME": "probe", "SLURM_JOB_CPUS_PER_NODE": "2", "SLURM_NNODES": "1",
                 "SLURM_GPUS_ON_NODE": gpus}
    command = ["bash", "slurm/cpu-container.sbatch", "--checkpoint", tmp_path / "probe.pt"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.stdout.split()[-1:] == [shown], (
        f"with {gpus or 'no'} GPUs, NVIDIA_VISIBLE_DEVICES is to be {shown}:\n{done}")


def test_one_official_image_is_imported_and_is_what_a_job_starts():
    script = (ROOT / "containers/create-enroot-image.sh").read_text()
    sbatch = (ROOT / "slurm/cpu-container.sbatch").read_text()
    job = (ROOT / "containers/kubernetes/job.yaml").read_text()
    (imported,) = re.findall(r"\$\{1:-docker://(\S+)\}", script)
    (started,) = re.findall(r"image: docker\.io/(\S+)", job)
    official = lab.OFFICIAL_IMAGE.removeprefix("docker.io/")
    assert {imported, started} == {official}, (
        f"imported: {imported}, in job.yaml: {started}, in the Dockerfile: {official}")
    (written,) = re.findall(r"\$\{2:-(\S+)\}", script)
    (read,) = re.findall(r"\$\{IMAGE:-(\S+)\}", sbatch)
    assert written == read, f"{written} is written, and cpu-container.sbatch reads {read}"


def test_the_dockerfile_has_the_arguments_of_the_page():
    page = (ROOT / "containers/README.md").read_text()
    named = set(re.findall(r"--build-arg ([A-Z_]+)=", page))
    known = set(re.findall(r"^ARG ([A-Z_]+)", lab.DOCKERFILE.read_text(), re.M))
    assert named == known, f"--build-arg on the page: {named}; ARG in the Dockerfile: {known}"


def in_image(*command):
    """Run a command in the image, without a network. Return its output."""
    if lab.missing():
        pytest.skip(lab.missing())
    (image,) = lab.images()[lab.OUR_IMAGE]
    return lab.sh(*lab.PODMAN_RUN, "--network", "none", image, *command, timeout=180)


@pytest.mark.images
def test_the_image_holds_the_scripts_alone_and_a_user_who_has_a_home():
    output = in_image("sh", "-c", "id -u && touch ~/writable && find . -type f | sort")
    files = ["slurm/requirements.txt", *(f"{script}/train.py" for script in SCRIPTS)]
    expected = ["1001", *sorted(f"./{file}" for file in files)]
    assert output.split() == expected, f"user and files are to be {expected}, see .dockerignore"


@pytest.mark.images
def test_the_image_trains_with_two_processes():
    output = in_image()
    assert "world size 2 " in output, f"the image is to start two processes:\n{output}"
    assert "epoch 50/50  loss 0.00" in output, f"cpu_ddp has not learned:\n{output}"
