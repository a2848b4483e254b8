"""containers/Dockerfile is built and trains; create-enroot-image.sh is run with a stand-in for enroot."""

import json
import os
import re
import subprocess

import kubernetes_lab as lab
import pytest

ROOT = lab.ROOT
SCRIPTS = ["cifar10_ddp", "cpu_ddp", "fashionmnist_ddp", "mnist_dp", "synthetic_ddp"]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    lab.skip_unless_images_can_be_built()
    folder = tmp_path_factory.mktemp("image")
    name = lab.build_image(folder, lab.base_image(folder))
    yield name
    lab.sh("buildah", "rmi", "--force", name)


def in_container(image, *command):
    return lab.sh(*lab.podman_run("--rm", "--network", "none", image, *command), timeout=180)


def test_image_trains_on_two_workers_as_it_is(image):
    output = in_container(image)
    assert re.search(r"^cpu_ddp: 2 workers", output, re.M)
    assert float(re.search(r"within (\S+) of the true ones", output)[1]) < 0.02


def test_image_holds_the_scripts_for_a_user_that_is_not_root(image):
    assert in_container(image, "id", "-u").strip() == "1001"
    assert in_container(image, "sh", "-c", "touch ~/x /workspace/x && echo $HOME && whoami").split() == ["/home/trainer", "trainer"]
    files = in_container(image, "find", ".", "-type", "f").split()
    assert sorted(files) == sorted([f"./{script}/train.py" for script in SCRIPTS] + ["./slurm/requirements.txt"])
    imports = "import etcd, torchvision"  # what the other scripts and the etcd variant need, beyond what cpu_ddp does
    in_container(image, "python3", "-c", imports)


def test_image_is_a_small_addition_to_its_base(image):
    sizes = [lab.sh("podman", "image", "inspect", "--format", "{{.Size}}", name) for name in (image, lab.base_image(None))]
    assert int(sizes[0]) - int(sizes[1]) < 20e6
    history = json.loads(lab.sh("podman", "history", "--format", "json", image))
    assert len([layer for layer in history if layer["size"]]) <= 4  # base, requirements, packages, scripts


def test_images_are_pinned():
    text = "".join(path.read_text() for path in (ROOT / "containers").rglob("*") if path.is_file())
    images = re.findall(r"(?:pytorch/pytorch|coreos/etcd|python|debian)(?=:)(\S*)", text)
    assert len(images) >= 4 and all(re.match(r":v?\d+\.\d+", tag) for tag in images), images
    assert len(set(re.findall(r"pytorch/pytorch:([\w.-]+)", text))) == 1, "one version of the official image, everywhere"


# --- create-enroot-image.sh. Enroot cannot be installed here: `enroot` is a stand-in that notes its arguments ---
@pytest.fixture
def enroot(tmp_path):
    """Run create-enroot-image.sh in tmp_path with an `enroot` that is this shell text, run with OUTPUT set."""
    def run(*arguments, stand_in='printf "hsqs and more" >"$OUTPUT"'):
        (tmp_path / "bin").mkdir(exist_ok=True)
        enroot = tmp_path / "bin/enroot"
        enroot.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >{tmp_path}/asked\n[ "$1 $2" = "import --output" ]\nOUTPUT=$3\n{stand_in}\n')
        enroot.chmod(0o755)
        environment = {**os.environ, "PATH": f'{tmp_path}/bin:{os.environ["PATH"]}'}
        return subprocess.run(["bash", ROOT / "containers/create-enroot-image.sh", *arguments], cwd=tmp_path,
                              env=environment, capture_output=True, text=True, timeout=30)
    return run


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir() if path.name not in ("bin", "asked"))


def test_enroot_image_of_the_pinned_version(enroot, tmp_path):
    done = enroot()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pytorch.sqsh").read_text() == "hsqs and more"
    assert (tmp_path / "asked").read_text().split()[-1] == f"docker://{lab.OFFICIAL_IMAGE}"
    assert leftovers(tmp_path) == ["pytorch.sqsh"]


@pytest.mark.parametrize("image", ["docker://nvcr.io#nvidia/pytorch:25.05-py3", "dockerd://ddp:1", "podman://ddp:1"])
def test_enroot_image_of_another_image_at_another_place(enroot, tmp_path, image):
    (tmp_path / "images").mkdir()
    done = enroot(image, "images/mine.sqsh")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").read_text().split()[-1] == image
    assert leftovers(tmp_path / "images") == ["mine.sqsh"]


@pytest.mark.parametrize("stand_in, remedy", [
    ("echo '[INFO] Querying registry' >&2; echo '[ERROR] Could not process JSON input' >&2; exit 1", "registry"),
    ("echo 'Write failed because No space left on device' >&2; exit 1", "ENROOT_TEMP_PATH"),
    ("echo '[ERROR] URL https://x returned error code: 401 Unauthorized' >&2; exit 1", ".credentials"),
    ("echo 'enroot-nsenter: failed to set groups: Operation not permitted' >&2; exit 1", "enroot+caps"),
    ("echo '[ERROR] failed to create user namespace: Permission denied' >&2; exit 1", "enroot+caps"),
    ("echo '[INFO] Found 8d4013ab403' >&2; echo '[ERROR] Could not resolve host: x' >&2; exit 1", "registry"),
    ("echo 'permission denied while trying to connect to the Docker daemon socket' >&2; exit 1", "whether you may use it"),
    ("echo 'curl: (7) Failed to connect to x port 443' >&2; exit 1", "way to the registry"),
    ("exit 1", "registry"),
    ("printf half >\"$OUTPUT\"", "no whole image"),
    ("true", "no whole image"),
])
def test_enroot_failure_is_one_line_and_keeps_the_old_image(enroot, tmp_path, stand_in, remedy):
    (tmp_path / "pytorch.sqsh").write_text("old")
    done = enroot(stand_in=stand_in)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and remedy in done.stderr, done.stderr
    assert (tmp_path / "pytorch.sqsh").read_text() == "old"
    assert leftovers(tmp_path) == ["pytorch.sqsh"]


def test_interrupted_enroot_leaves_nothing(enroot, tmp_path):
    (tmp_path / "pytorch.sqsh").write_text("old")
    done = enroot(stand_in='printf hsqs >"$OUTPUT"; kill -TERM $PPID; sleep 1')
    assert done.returncode != 0
    assert leftovers(tmp_path) == ["pytorch.sqsh"] and (tmp_path / "pytorch.sqsh").read_text() == "old"


@pytest.mark.parametrize("arguments", [["pytorch/pytorch:2.9.1"], ["docker://"], ["docker://a", "b", "c"], ["docker://a:1", "no/folder/x.sqsh"],
                                       ["docker://a:1", "/tmp"]])
def test_enroot_mistakes_are_one_line(enroot, tmp_path, arguments):
    done = enroot(*arguments)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert leftovers(tmp_path) == [] and not (tmp_path / "asked").exists()


def test_without_enroot_one_line_says_so(tmp_path):
    done = subprocess.run(["bash", ROOT / "containers/create-enroot-image.sh"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=30, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "enroot is missing" in done.stderr
