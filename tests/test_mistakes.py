"""What a user can get wrong: each mistake ends every worker within seconds, non-zero, in one line that names the remedy."""

import os
import re
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import (Job, cifar_files, clean_environment, error_lines, free_port, idx, mnist_files, run, script_path, slurm_step,
                     write_files)

SECONDS = 100  # imports take 3 on an idle machine; this is one that runs other things too
IMAGES = torch.zeros(40, 28, 28, dtype=torch.uint8)
TORCHRUN = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
SLURM = {**slurm_step(2, 0, 29500), "MASTER_ADDR": None, "MASTER_PORT": None}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders and files with something wrong in them, by name."""
    top = tmp_path_factory.mktemp("places")
    good = mnist_files()

    def data(name, **changes):
        """A folder with both data sets, and these changes to the training files."""
        files = {**good, **{f"train-{key}-ubyte": content for key, content in changes.items()}}
        for dataset in "MNIST", "FashionMNIST":
            write_files(top / name / dataset / "raw", {key: content for key, content in files.items() if content is not None})

    data("good")
    data("no_labels", **{"labels-idx1": None})
    data("truncated", **{"images-idx3": good["train-images-idx3-ubyte"][:-100]})
    data("too_long", **{"images-idx3": good["train-images-idx3-ubyte"] + b"more"})
    data("other_magic", **{"images-idx3": b"\x89PNG" + good["train-images-idx3-ubyte"]})
    data("nothing_in_it", **{"images-idx3": b""})
    data("no_images", **{"images-idx3": idx(IMAGES[:0]), "labels-idx1": idx(IMAGES[:0, 0, 0])})
    data("small_images", **{"images-idx3": idx(IMAGES[:, :20, :20])})
    data("fewer_labels", **{"labels-idx1": idx(IMAGES[:39, 0, 0])})
    data("label_11", **{"labels-idx1": idx(torch.arange(40, dtype=torch.uint8) % 12)})
    write_files(top / "cifar_md5" / "cifar-10-batches-py", cifar_files())
    (top / "empty").mkdir()
    (top / "file").write_text("this is no folder\n")
    (top / "loop").symlink_to(top / "loop")  # unreadable to everybody, root too
    (top / "text.pt").write_text("this is no snapshot\n")
    (top / "folder.pt").mkdir()
    torch.save({"weight": torch.zeros(3)}, top / "weights.pt")
    made = run("cpu_ddp", "--epochs", "1", "--batch-size", "3", "--checkpoint", top / "batch3.pt", timeout=SECONDS)
    assert made.status == 0, made
    (top / "damaged.pt").write_bytes((top / "batch3.pt").read_bytes()[:-50])
    return top


def mistake(script, flags, names, **env):
    """One case: flags of a script, `{}` standing for the folder of places, and what the error line must name."""
    what = flags or " ".join(name if value is None else f"{name}={value}" for name, value in env.items() if value != TORCHRUN.get(name))
    return pytest.param(script, flags, names, env, id=f"{script} {what}".replace("{}/", ""))


def without(environment, name):
    return {**environment, name: None}


ALONE = [  # under plain python
    *(mistake(script, "--learning-rate 1", "--learning-rate")
      for script in ("cpu_ddp", "mnist_dp", "cifar10_ddp", "fashionmnist_ddp", "synthetic_ddp")),
    mistake("cpu_ddp", "50 10", "50 10"),  # the tutorial's positional arguments
    mistake("cpu_ddp", "--data-dir data", "--data-dir"),
    mistake("cpu_ddp", "--checkpoint", "--checkpoint"),
    mistake("cpu_ddp", "--epochs 0", "--epochs"),
    mistake("fashionmnist_ddp", "--epochs -3", "--epochs"),
    mistake("mnist_dp", "--epochs x", "--epochs"),
    mistake("cifar10_ddp", "--epochs 1.5", "--epochs"),
    mistake("synthetic_ddp", "--epochs 99999999999999999999", "--epochs"),
    mistake("cpu_ddp", "--lr nan", "--lr"),
    mistake("synthetic_ddp", "--lr inf", "--lr"),
    mistake("fashionmnist_ddp", "--lr 0", "--lr"),
    mistake("mnist_dp", "--lr -1e-3", "--lr"),
    mistake("cifar10_ddp", "--lr fast", "--lr"),
    mistake("cifar10_ddp", "--batch-size 0", "--batch-size"),
    mistake("synthetic_ddp", "--batch-size 1e3", "--batch-size"),
    mistake("mnist_dp", "--seed -1", "--seed"),
    mistake("cpu_ddp", "--samples 0", "--samples"),
    mistake("synthetic_ddp", "--model resnet18 --image-size 0", "--image-size"),
    mistake("synthetic_ddp", "--model resnet18 --steps -1", "--steps"),
    mistake("synthetic_ddp", "--model alexnet --image-size 32", "alexnet.*32 pixels.*--image-size"),
    mistake("synthetic_ddp", "--model vit_b_16 --image-size 64 --batch-size 2", "vit_b_16.*64 pixels.*--image-size"),
    mistake("synthetic_ddp", "--model resnet18 --image-size 32 --batch-size 1", "1 images.*--batch-size"),
    mistake("cpu_ddp", "--timeout 0", "--timeout"),
    mistake("cifar10_ddp", "--save-every 0", "--save-every"),
    mistake("mnist_dp", "--save-every-steps -5", "--save-every-steps"),
    mistake("fashionmnist_ddp", "--log-every 0", "--log-every"),
    mistake("cifar10_ddp", "--fake-data 3", "--fake-data"),
    mistake("fashionmnist_ddp", "--nproc 0", "--nproc"),
    mistake("fashionmnist_ddp", "--nproc two", "--nproc"),
    mistake("cifar10_ddp", "--model resnet19", "resnet18"),
    mistake("cifar10_ddp", "--model fcn_resnet50", "resnet50"),  # no classifier
    mistake("synthetic_ddp", "--model xyz", "--model"),
    mistake("mnist_dp", "--device-ids 0 --fake-data", "--device-ids"),
    mistake("mnist_dp", "--device-ids a,b --fake-data", "--device-ids"),
    # data
    mistake("mnist_dp", "--data-dir {}/absent", "places0/absent.*MNIST/raw.*--fake-data"),
    mistake("fashionmnist_ddp", "--data-dir {}/empty", "places0/empty.*FashionMNIST/raw.*--fake-data"),
    mistake("cifar10_ddp", "--data-dir {}/empty", "places0/empty.*cifar-10-batches-py.*--fake-data"),
    mistake("fashionmnist_ddp", "--data-dir {}/file", "--data-dir"),
    mistake("cifar10_ddp", "--data-dir {}/file", "--data-dir"),
    mistake("mnist_dp", "--data-dir {}/loop", "--data-dir"),
    mistake("cifar10_ddp", "--data-dir {}/cifar_md5", "cifar-10-batches-py"),
    *(mistake(script, f"--data-dir {{}}/{folder}", f"{folder}.*MNIST/raw") for script, folder in [
        ("mnist_dp", "no_labels"), ("fashionmnist_ddp", "truncated"), ("mnist_dp", "too_long"), ("fashionmnist_ddp", "other_magic"),
        ("mnist_dp", "nothing_in_it"), ("fashionmnist_ddp", "no_images"), ("mnist_dp", "small_images"),
        ("fashionmnist_ddp", "fewer_labels"), ("mnist_dp", "label_11")]),
    # batch larger than the data
    mistake("cpu_ddp", "--batch-size 2049", "--batch-size"),
    mistake("synthetic_ddp", "--batch-size 5000", "--batch-size"),
    mistake("cifar10_ddp", "--fake-data 100", "--batch-size"),
    mistake("mnist_dp", "--data-dir {}/good --batch-size 64", "--batch-size"),
    mistake("fashionmnist_ddp", "--fake-data 100 --nproc 2", "--batch-size"),
    # snapshots
    mistake("cpu_ddp", "--checkpoint {}/folder.pt", "--checkpoint"),
    mistake("cpu_ddp", "--checkpoint=", "--checkpoint .*empty"),  # a shell variable that is not set
    mistake("mnist_dp", "--fake-data --checkpoint {}/nowhere/", "--checkpoint .*folder"),
    mistake("cpu_ddp", "--checkpoint {}/file/x.pt", "--checkpoint"),
    mistake("synthetic_ddp", "--checkpoint /proc/x.pt", "--checkpoint"),
    mistake("mnist_dp", "--fake-data --checkpoint {}/file/x.pt", "--checkpoint"),
    mistake("cpu_ddp", "--checkpoint /dev/null", "--checkpoint"),
    mistake("cpu_ddp", "--checkpoint {}/text.pt", "--fresh"),
    mistake("cpu_ddp", "--lr 1e9", "lower --lr.*--fresh"),  # the loss becomes infinite
    mistake("mnist_dp", "--fake-data 64 --lr 1e9 --batch-size 8", "lower --lr.*--fresh"),
    mistake("cpu_ddp", "--check x", "--check"),  # no abbreviations: the sbatch files look for --checkpoint
    mistake("cpu_ddp", "--checkpoint {}/damaged.pt", "--fresh"),
    mistake("cpu_ddp", "--checkpoint {}/weights.pt", "--fresh"),
    mistake("synthetic_ddp", "--checkpoint {}/batch3.pt", "--fresh"),  # another script's
    mistake("cpu_ddp", "--seed 1 --checkpoint {}/batch3.pt", "seed"),
    # launchers
    mistake("mnist_dp", "--fake-data", "python train.py.*fashionmnist_ddp", **TORCHRUN),
    mistake("mnist_dp", "--fake-data", "python train.py.*fashionmnist_ddp", **SLURM),
    mistake("fashionmnist_ddp", "--nproc 2 --fake-data", "--nproc", **TORCHRUN),
    *(mistake("cpu_ddp", "", name, **without(TORCHRUN, name)) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
    *(mistake("synthetic_ddp", "", name, **without(SLURM, name))
      for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_JOB_ID")),
    *(mistake("cifar10_ddp", "", name, **{**TORCHRUN, name: value}) for name, value in [
        ("RANK", 2), ("RANK", -1), ("RANK", "first"), ("WORLD_SIZE", 0), ("LOCAL_RANK", 1), ("MASTER_PORT", 0), ("MASTER_PORT", 70000),
        ("MASTER_ADDR", ""), ("LOCAL_WORLD_SIZE", 0)]),
    mistake("cpu_ddp", "--timeout 2", "nowhere.invalid", **{**TORCHRUN, "RANK": 1, "LOCAL_RANK": 1, "MASTER_ADDR": "nowhere.invalid"}),
    mistake("cpu_ddp", "--timeout 2", "rank 0", **{**TORCHRUN, "MASTER_PORT": free_port()}),  # rank 1 never comes
]


@pytest.fixture(scope="module")
def outcomes(request, places):
    """Run the chosen cases of ALONE, two at a time; a dictionary of what will come out of each."""
    chosen = [item.callspec for item in request.session.items if getattr(item, "originalname", "") == "test_alone"]
    assert len(ALONE) >= 40
    with ThreadPoolExecutor(2) as pool:
        def result(script, flags, names, env):
            return run(script, *flags.replace("{}", str(places)).split(), env=env, cwd=places, timeout=SECONDS)
        yield {case.id: pool.submit(result, **case.params) for case in chosen}
        pool.shutdown(cancel_futures=True)


def assert_one_error(result, names, count=1):
    """All have failed, and all together have said one thing, which names the remedy."""
    assert all(status not in (0, 75) for status in result.statuses), result
    assert len(result.errors) == count, result
    assert re.search(names, result.errors[0]), result.errors[0]
    assert "Traceback" not in result.stderr, result.stderr


@pytest.mark.parametrize("script, flags, names, env", ALONE)
def test_alone(script, flags, names, env, outcomes, request):
    assert_one_error(outcomes[request.node.callspec.id].result(timeout=30 * SECONDS), names)


TOGETHER = [  # under torchrun, with two workers
    mistake("cpu_ddp", "--epochs x", "--epochs"),
    mistake("mnist_dp", "--fake-data", "python train.py"),
    mistake("cifar10_ddp", "--model resnet", "resnet18"),
    mistake("fashionmnist_ddp", "--data-dir {}/label_11", "--data-dir.*rank 0"),
    mistake("synthetic_ddp", "--checkpoint {}/text.pt", "--fresh.*rank 0"),
    mistake("cpu_ddp", "--batch-size 3 --checkpoint {}/batch3.pt", "3 .*2 workers"),  # 3 does not split over 2
]


@pytest.mark.parametrize("script, flags, names, env", TOGETHER)
def test_under_torchrun(script, flags, names, env, places):
    copy = places / "copy.pt"
    shutil.copy(places / "batch3.pt", copy)
    flags = flags.replace("{}/batch3.pt", str(copy)).replace("{}", str(places)).split()
    assert_one_error(run(script, *flags, launcher="torchrun", workers=2, timeout=SECONDS), names)


def in_a_step(script, *flags, **how):
    return run(script, *flags, launcher="srun", workers=2, timeout=SECONDS, **how)


def test_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = in_a_step("cpu_ddp", "--timeout", "5", env={"MASTER_PORT": port})
    assert_one_error(result, f"port.*{port}", count=2)
    assert [len(error_lines(stderr)) for stderr in result.stderrs] == [1, 1]  # nothing has ended rank 1 but its timeout
    assert f"port 127.0.0.1:{port}" in result.stderrs[1]


def test_port_in_use_and_nobody_to_tell():
    """The terminal is closed; the end comes all the same."""
    reader, writer = os.pipe()
    os.close(reader)
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = clean_environment({**TORCHRUN, "RANK": 1, "LOCAL_RANK": 1, "MASTER_PORT": server.getsockname()[1]})
        command = [sys.executable, script_path("cpu_ddp"), "--timeout", "2"]
        assert subprocess.run(command, env=environment, stderr=writer, timeout=SECONDS).returncode == 1
    os.close(writer)


def test_one_node_lacks_the_data(places):
    """The worker that sees it says so, with its hostname; rank 0, which has the data, leaves with it."""
    result = in_a_step("fashionmnist_ddp", "--epochs", "1", "--batch-size", "4", rank_env=lambda rank: slurm_step(2, rank, 29517, nodes=2),
                       env={"MASTER_PORT": None}, rank_flags=lambda rank: ["--data-dir", places / ("absent" if rank else "good")])
    assert_one_error(result, rf"absent.*rank 1 on {re.escape(socket.gethostname())}")
    assert error_lines(result.stderrs[1])


def changed(tmp_path, change, script):
    """A program that is this script after a change to torch."""
    program = tmp_path / "program.py"
    program.write_text(f"import runpy, sys, torch\n{change}\nrunpy.run_path({str(script_path(script))!r}, run_name='__main__')\n")
    return program


LOST = "torch.cuda.set_device = lambda *_: (_ for _ in ()).throw(torch.cuda.DeferredCudaCallError('it is lost'))"


@pytest.mark.parametrize("script", ("mnist_dp", "cifar10_ddp", "synthetic_ddp"))
@pytest.mark.parametrize("change, problem", (("", "no NVIDIA driver"), (LOST, "it is lost")), ids=("no driver", "lost"))
@pytest.mark.skipif(not torch.version.cuda or torch.cuda.is_available(), reason="needs PyTorch with CUDA, and no GPU")
def test_gpu_that_cannot_be_used(script, change, problem, tmp_path):
    """One is there, as NVML would say, but CUDA does not start on it: here for want of any driver."""
    program = changed(tmp_path, f"torch.cuda.device_count = lambda: 1\n{change}", script)
    result = run(program, *["--fake-data"] * (script != "synthetic_ddp"), timeout=SECONDS)
    assert_one_error(result, f"GPU 0.*{problem}.*CUDA_VISIBLE_DEVICES=")


def test_model_that_is_not_deterministic(tmp_path):
    change = ("torch.use_deterministic_algorithms(True)\n"
              "torch.nn.functional.mse_loss = lambda x, y: x.clone().put_(torch.tensor([0]), torch.ones(1)).sum()")
    assert_one_error(run(changed(tmp_path, change, "cpu_ddp"), timeout=SECONDS), "put_.*leave out --deterministic")


def test_no_node_has_the_data(places):
    result = in_a_step("cifar10_ddp", "--data-dir", places / "empty")
    assert_one_error(result, rf"empty.*rank 0 on {re.escape(socket.gethostname())}")


def test_one_node_is_started_with_another_flag():
    """Nobody but rank 1 sees it; rank 0 waits for it in vain."""
    result = in_a_step("cpu_ddp", "--timeout", "5", rank_flags=lambda rank: ["--epohcs", "3"] if rank else [])
    assert_one_error(result, "", count=2)
    assert "--epohcs" in error_lines(result.stderrs[1])[0]


ALLOCATION = {"SLURM_JOB_ID": 1, "SLURM_NTASKS": 4, "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NNODES": 2, "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.mark.parametrize("env", [
    pytest.param(ALLOCATION, id="in the shell of sbatch or salloc"),
    pytest.param({**ALLOCATION, **slurm_step(4, 0, 29500), "SLURM_PTY_PORT": 4000, "SLURM_TASK_PID": 1}, id="in the shell of srun --pty"),
])
def test_leftovers_of_slurm_mean_one_worker(env):
    result = run("cpu_ddp", "--epochs", "1", env=env, timeout=SECONDS)
    assert result.status == 0 and re.match(r"cpu_ddp: 1 worker ", result.stdout), result


def test_a_task_of_srun_pty_is_a_worker():
    """`srun --pty python train.py`: the task is the script itself, not a shell around it."""
    env = clean_environment({**slurm_step(2, 0, free_port()), "SLURM_PTY_PORT": 4000})
    command = ["bash", "-c", 'export SLURM_TASK_PID=$$; exec "$@"', "-", sys.executable, script_path("cpu_ddp"), "--timeout", "2"]
    with Job([command], [env]) as job:
        assert_one_error(job.finish(SECONDS), "lost")  # the second of two tasks
