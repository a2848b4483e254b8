"""What sets a machine up works, or says what is missing: environments, images, Slurm.

A tiny package, whose torchrun prints "ready", takes the place of PyTorch. pip is configured for
installations into the home, which has the package already, without torchrun. Slurm is installed on
a copy of this machine, by systemd-nspawn: what the copy writes to its disk is gone when it ends;
everything else is real, systemd included.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile

import kubernetes_lab as lab
import pytest
from scripts import ROOT, SCRIPTS
from slurm_lab import INSTALL, Machine, Network, booted, write_program

slow, slurm, images = pytest.mark.slow, pytest.mark.slurm, pytest.mark.images


# --- slurm/create-venv.sh, create-conda-env.sh, shell files of a clone ---
# No conda can be had here: this records its arguments and makes a venv that sees the home, too.
CONDA = f"""
echo "$*" >>"$0.calls"
case $* in
    "create --yes --prefix "*) {sys.executable} -m venv --clear --system-site-packages "$4" ;;
    "run --prefix "*) [[ -d $3 ]] && CONDA_PREFIX=$3 "${{@:4}}" ;;
esac
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The tiny package."""
    path = tmp_path_factory.mktemp("wheels") / "tiny-1.0-py3-none-any.whl"
    files = {"WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n", "RECORD": "",
             "METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
             "entry_points.txt": "[console_scripts]\ntorchrun = tiny:show\n"}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny.py", "def show(): print('ready')\n")
        for name, text in files.items():
            archive.writestr(f"tiny-1.0.dist-info/{name}", text)
    return path


@pytest.fixture
def project(wheel, tmp_path, monkeypatch):
    """A folder with slurm/, and pip finds nothing but the tiny package."""
    home = f".local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    shutil.unpack_archive(wheel, tmp_path / home, "zip")
    monkeypatch.setattr(os, "environ", {
        "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_USER": "1",
        "PIP_FIND_LINKS": wheel.parent.as_uri(), "PYTHON": sys.executable, "HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "CDPATH": "."})  # as some shells export it: cd prints where it has found a folder
    shutil.copytree(ROOT / "slurm", tmp_path / "a project/slurm")
    (tmp_path / "a project/slurm/requirements.txt").write_text("tiny\n")
    return tmp_path / "a project"


def bash(script, *arguments):
    """Run a script of a folder, as it is typed beside the folder."""
    path = f"{script.parent.name}/{script.name}"
    return subprocess.run(["bash", path, *arguments], cwd=script.parents[1], env=os.environ,
                          capture_output=True, text=True, timeout=180)


def assert_makes(script, folder):
    """Run the script, which makes an environment in the folder, or completes it."""
    done = bash(script)
    assert done.returncode == 0, f"{script.name} failed:\n{done.stdout}{done.stderr}"
    found = subprocess.run([folder / "bin/torchrun"], capture_output=True, text=True,
                           env={"PYTHONNOUSERSITE": "1"})
    assert found.stdout == "ready\n", (
        f"{script.name}: torchrun does not start:\n{found.stderr}\n{done.stdout}{done.stderr}")


@slow
def test_venv_that_was_interrupted_is_completed(project):
    """It has no pip, and not the file that venv writes last."""
    command = [sys.executable, "-m", "venv", "--without-pip", project / ".venv"]
    subprocess.run(command, check=True, timeout=60)
    (project / ".venv/bin/activate").unlink()
    assert_makes(project / "slurm/create-venv.sh", project / ".venv")


@slow
@pytest.mark.parametrize("venv, change", [
    ("copied", "cp -a .venv copied"),
    (".venv", "rm .venv/lib/python*/site-packages/tiny.py"),  # as after an upgrade of Python
])
def test_venv_that_does_not_work_is_not_ready(project, venv, change):
    assert_makes(project / "slurm/create-venv.sh", project / ".venv")
    subprocess.run(["bash", "-c", change], cwd=project, check=True, timeout=30)
    done = bash(project / "slurm/create-venv.sh", venv)
    assert done.returncode != 0, f"create-venv.sh calls it ready:\n{done.stdout}"
    assert re.search(f"^error: .*delete .*/{venv}", done.stderr, re.MULTILINE), (
        f"no error line that names the folder to delete:\n{done.stderr}")


@slow
@pytest.mark.parametrize("script, lack, remedy", [
    ("create-venv.sh", "sys.version_info = (3, 9, 1)", "Python 3.10"),
    ("create-venv.sh", "sys.modules['ensurepip'] = None", "python3-venv"),
    ("create-conda-env.sh", "no conda", f"{os.uname().sysname}-{os.uname().machine}.sh\n    bash "),
])
def test_what_the_machine_lacks_is_an_error_line(script, lack, remedy, project):
    """This machine's Python takes the place of one that is too old or has no venv."""
    write_program(project / "python", f'exec {sys.executable} -c "import sys; {lack}; $2"')
    os.environ["PYTHON"] = str(project / "python")
    done = bash(project / "slurm" / script)
    assert done.returncode != 0, f"{script} succeeds, and must say: {remedy}"
    assert done.stderr.startswith("error: "), f"no error line:\n{done.stderr}"
    assert remedy in done.stderr, f"the error line does not name {remedy}:\n{done.stderr}"
    assert not (project / ".venv").exists(), "a Python that cannot make a venv has begun one"


@slow
def test_conda_environment_is_made_once(project, tmp_path):
    """By a conda that is where Miniforge puts it, and not on PATH."""
    conda = tmp_path / "miniforge3/bin/conda"
    write_program(conda, CONDA)
    for _ in range(2):
        assert_makes(project / "slurm/create-conda-env.sh", project / ".conda")
    text = conda.with_name("conda.calls").read_text()
    made = re.findall("^create --yes --prefix (.*)", text, re.MULTILINE)
    options = "--override-channels --channel conda-forge python=3.12 pip"
    assert made == [f"{project}/.conda {options}"], (
        f"two runs did not make one environment, from conda-forge:\n{text}")


@slow
def test_shell_files_run_in_a_clone_with_windows_line_ends(tmp_path):
    command = ["git", "-c", "core.autocrlf=true", "-c", "safe.directory=*", "clone", "--quiet",
               ROOT, tmp_path / "clone"]
    subprocess.run(command, check=True, timeout=60)
    files = [*tmp_path.glob("clone/*/*.sh"), *tmp_path.glob("clone/*/*.sbatch")]
    changed = [path.name for path in files if b"\r\n" in path.read_bytes()]
    assert not changed, f"bash cannot run files of such a clone: {changed}"


# --- containers/ ---
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


def test_the_official_image_is_imported_and_is_what_a_job_starts():
    """That of the Dockerfile. (test_kubernetes.py compares job.yaml with it, too.)"""
    script = (ROOT / "containers/create-enroot-image.sh").read_text()
    sbatch = (ROOT / "slurm/cpu-container.sbatch").read_text()
    (imported,) = re.findall(r"\$\{1:-docker://(\S+)\}", script)
    official = lab.OFFICIAL_IMAGE.removeprefix("docker.io/")
    assert imported == official, f"imported: {imported}, in the Dockerfile: {official}"
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
    image = lab.images()[lab.OUR_IMAGE]
    return lab.sh(*lab.PODMAN_RUN, "--network", "none", image, *command, timeout=180)


@images
def test_the_image_holds_the_scripts_alone_and_a_user_who_has_a_home():
    output = in_image("sh", "-c", "id -u && touch ~/writable && find . -type f | sort")
    files = ["slurm/requirements.txt", *(f"{script}/train.py" for script in SCRIPTS)]
    expected = ["1001", *sorted(f"./{file}" for file in files)]
    assert output.split() == expected, f"user and files are to be {expected}, see .dockerignore"


@images
def test_the_image_trains_with_two_processes():
    output = in_image()
    assert "world size 2 " in output, f"the image is to start two processes:\n{output}"
    assert "epoch 50/50  loss 0.00" in output, f"cpu_ddp has not learned:\n{output}"


# --- slurm/install-slurm.sh ---
# PID 1 of the copy starts here. It has no configuration of Slurm, and nobody resolves its name.
COPY = """set -e
for folder in /run /tmp; do     # nspawn's own files
    mount -t tmpfs tmpfs $folder
done
mkdir /run/root
mount --bind / /run/root
exec systemd-nspawn --quiet --register=no --keep-unit --link-journal=no --directory=/run/root \
    --volatile=overlay --private-network --boot systemd.unit=basic.target systemd.hostname=head
"""
PREPARE = """until [[ $(systemctl is-system-running) =~ running|degraded ]]; do sleep 0.1; done
mkdir -p /run/lock
rm -rf /etc/slurm/*.conf /var/l*/slurm/*/* /var/log/slurm/*
echo 127.0.0.1 localhost >/etc/hosts
sed -i 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf
mknod -m 666 /dev/nvidia0 c 1 5     # two GPUs
mknod -m 666 /dev/nvidia1 c 1 7
"""
RUN = "bash /run/install-slurm.sh"


class Copy(Machine):
    def command(self):
        return ["unshare", "--mount-proc", "--pid", "--fork", "--kill-child=KILL",
                "bash", "-c", COPY]


# The tests change this machine, in their order.
@pytest.fixture(scope="module")
def machine():
    """The copy, as the head of a network without nodes."""
    with booted(lambda root: Network(root, 0, Copy)) as network:
        head = network.machines["head"]
        head.exec(PREPARE, timeout=60)
        shutil.copy(INSTALL, f"/proc/{head.pid}/root/run/")
        yield head


@slurm
@pytest.mark.parametrize("name", ["slurm.conf", "gres.conf", "cgroup.conf"])
def test_configuration_of_somebody_else_is_refused(machine, name):
    machine.exec(f"echo '# mine' > /etc/slurm/{name}")
    said = machine.exec(RUN, check=False)
    text = machine.exec("cat /etc/slurm/*.conf; rm /etc/slurm/*.conf")
    assert said.startswith(f"error: /etc/slurm/{name}"), f"no error line for a {name}:\n{said}"
    assert text.endswith("# mine\n"), f"{name} of somebody else was changed to:\n{text}"


@slurm
def test_the_machine_becomes_a_cluster_with_its_hardware(machine):
    said = machine.exec(RUN, timeout=120)
    assert "srun hostname: head" in said, f"no job has run:\n{said}"
    hardware = dict(word.split("=") for word in machine.exec("slurmd -C | head -1").split())
    cpus, memory, gpus = machine.exec("sinfo -ho '%c %m %G' --partition=main").split()
    assert cpus == hardware["CPUs"], f"Slurm has {cpus} CPUs, the machine {hardware['CPUs']}"
    share = int(memory) / int(hardware["RealMemory"])
    assert 0.9 < share < 1, f"Slurm has {share:.2f} of the memory, not a little less than all"
    assert gpus.startswith("gpu:2"), f"Slurm has the GPUs {gpus}, the machine 2"
    visible = machine.exec("srun --gpus=1 printenv CUDA_VISIBLE_DEVICES").splitlines()[-1]
    assert visible == "0", f"a job that requests a GPU sees {visible!r}"


@slurm
def test_another_installation_reads_what_was_edited_in_slurm_conf(machine):
    """Here: shorter waits, for the next test."""
    settings = "KillWait=2\nAuthInfo=cred_expire=5\nSchedulerParameters=sched_interval=1\n"
    machine.exec(f"printf '{settings}' >>/etc/slurm/slurm.conf")
    again = machine.exec(RUN, timeout=120)
    setting = machine.exec("scontrol show config | grep KillWait")
    assert "= 2 sec" in setting, f"KillWait=2 in slurm.conf has no effect: {setting}\n{again}"


@slurm
def test_urgent_job_preempts_and_the_other_is_requeued(machine):
    """The first life of the job waits for ever."""
    life = "echo life ${SLURM_RESTART_COUNT:-0}; [ $SLURM_RESTART_COUNT ] || sleep 600"
    machine.exec(f"sbatch --exclusive --output=/run/preempted.out --wrap={shlex.quote(life)}; "
                 "until grep life /run/preempted.out; do sleep 0.1; done")
    said = machine.exec("srun --partition=urgent --exclusive echo urgent has run", timeout=60,
                        check=False)
    assert "urgent has run" in said, f"a job of urgent does not preempt one of main:\n{said}"
    text = machine.exec("while squeue -ho %i | grep .; do sleep 0.1; done >/dev/null; "
                        "cat /run/preempted.out", timeout=60)
    assert "life 1" in text, f"a job of main was not requeued after one of urgent:\n{text}"
