"""Each way to start the scripts gives each process its rank: see also test_smoke.py."""
import os
import pty
import re
import subprocess
import sys

from processes import Job, clean_environment, free_port
from scripts import script_path

START = 240  # seconds within which new interpreters train, on a machine that is very busy
ONE_EPOCH = ("--samples", 64, "--epochs", 1)


def test_two_torchruns_form_one_run(tmp_path):
    """As on two machines. Each process prints its ranks."""
    ranks = "    rank, _, world_size = setup_environment()\n"
    text = script_path("cpu_ddp").read_text()
    assert text.count(ranks) == 1, f"cpu_ddp/train.py must have this line once: {ranks}"
    copy = tmp_path / "train.py"
    copy.write_text(text.replace(
        ranks, ranks + '    print(f"<{rank} {os.environ[\'LOCAL_RANK\']} {world_size}>")\n'))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
               "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}",
               "--rdzv-id=two", "--local-addr=127.0.0.1", copy, *ONE_EPOCH]
    with Job([command, command], [clean_environment(), clean_environment()]) as job:
        result = job.finish(START)
    assert result.status == 0, f"two torchruns end with {result.status}\n{result.text}"
    found = sorted(re.findall(r"<\d+ \d+ \d+>", result.text))
    assert found == ["<0 0 4>", "<1 1 4>", "<2 0 4>", "<3 1 4>"], (
        f"two torchruns of two processes: ranks, local ranks, world sizes are {found}\n"
        f"{result.text}")
    headers = re.findall(r"^world size .*", result.text, re.MULTILINE)
    assert len(headers) == 1, f"rank 0 alone must print the header: {headers}\n{result.text}"


def test_python_in_a_shell_of_srun_pty_trains_alone():
    """srun --ntasks=4 --pty bash: there is a terminal, and the variables of four tasks."""
    env = clean_environment(SLURM_JOB_ID=4711, SLURM_STEP_ID=0, SLURM_STEP_NUM_TASKS=4,
                            SLURM_STEP_NODELIST="localhost", SLURM_PROCID=0, SLURM_LOCALID=0,
                            SLURM_PTY_PORT=40000)
    command = [sys.executable, script_path("cpu_ddp"), *map(str, ONE_EPOCH), "--timeout", "30"]
    terminal, end = pty.openpty()
    try:
        result = subprocess.run(command, env=env, stdin=end, capture_output=True, text=True,
                                timeout=START)
    finally:
        os.close(terminal)
        os.close(end)
    assert result.stdout.startswith("world size 1,"), (
        f"python in a shell of srun --pty must train alone: {result}")
    assert result.returncode == 0, f"python in a shell of srun --pty fails: {result}"
