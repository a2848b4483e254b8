"""Snapshots that are not whole, not ours or not writable: never executed, never overwritten, never silently wrong."""

import importlib.util
import io
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import zipfile

import pytest
import torch
from helpers import differences, load_snapshot, run, script_path, start

RUN = {"script": "cpu_ddp", "seed": 0, "lr": 0.1, "batch_size": 8, "global_batch": 8}


@pytest.fixture(scope="module")
def script():
    """A script as a module; the snapshot blocks of the others are copies of its own."""
    spec = importlib.util.spec_from_file_location("cpu_ddp_train", script_path("cpu_ddp"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parts(seed, width=40):
    """A model, an optimizer with state and a schedule, of a few dozen KiB."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** step)
    model(torch.randn(3, width)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@pytest.fixture
def saved(script, tmp_path):
    """A folder with the snapshots of step 1 (last.previous) and step 2 (last), as a script writes them."""
    for step in (1, 2):
        script.save_snapshot(str(tmp_path / "last"), step, RUN, parts(step))
    return tmp_path


def contents(folder):
    return sorted(path.read_bytes() for path in folder.iterdir())


def find(module, folder, **changed):
    return module.find_snapshot(str(folder / "last"), {**RUN, **changed}, False)


def test_whole_snapshot_is_the_newest(script, saved, capsys):
    before = contents(saved)
    assert find(script, saved)["step"] == 2
    assert not differences(load_snapshot(saved / "last")["model"], parts(2)["model"].state_dict())
    assert capsys.readouterr().err == ""
    assert contents(saved) == before


def test_truncated_at_every_kib(script, saved, capsys):
    whole, previous = (saved / "last").read_bytes(), load_snapshot(saved / "last.previous")
    assert len(whole) > 16 * 1024, "too small to show anything"
    for length in range(0, len(whole), 1024):
        (saved / "last").write_bytes(whole[:length])
        before = contents(saved)
        assert not differences(find(script, saved), previous), f"truncated to {length} bytes"
        assert capsys.readouterr().err.startswith("warning: "), f"truncated to {length} bytes"
        assert contents(saved) == before, "the damaged file is kept"
        for path in saved.glob("last.damaged-*"):
            path.unlink()


def test_truncated_without_a_previous_one(script, saved):
    whole = (saved / "last").read_bytes()
    (saved / "last.previous").unlink()
    for length in range(0, len(whole), 1024):
        (saved / "last").write_bytes(whole[:length])
        with pytest.raises(script.UserError, match="last"):
            find(script, saved)
        assert contents(saved) == [whole[:length]], "a refused file is left as it is"


def test_flipped_bits_are_never_accepted_silently(script, saved, chaos_seed):
    """One bit of the file is flipped, of every 16th byte or so and all of its directory. What is accepted must be equal to the original."""
    whole, original = (saved / "last").read_bytes(), load_snapshot(saved / "last")
    generator = random.Random(chaos_seed)
    harmless, wrong = 0, []
    with zipfile.ZipFile(saved / "last") as archive:
        directory = archive.start_dir  # which has no checksum
    positions = [(start + generator.randrange(16), generator.randrange(8)) for start in range(0, len(whole) - 16, 16)]
    positions += itertools.product(range(directory, len(whole)), range(8))
    for position, bit in positions:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << bit
        (saved / "last").write_bytes(damaged)
        try:
            state = script.read_snapshot(str(saved / "last"))
        except Exception:  # refused: how, the other tests see
            continue
        harmless += 1
        if differences(state, original):
            wrong.append(position)
    print(f"{len(positions)} flipped bits, {harmless} harmless, wrong at {wrong}")
    assert not wrong
    assert harmless < len(positions) / 3, "padding and unused header fields are a small part of the file"


def executes(path):
    """A pickle that makes the file at path, if anybody unpickles it."""
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(path),)
    return Bomb()


def damaged_files(folder):
    """Name and bytes of files that are no snapshot of ours."""
    trap = folder / "executed"
    for name, value in {"bomb": executes(trap), "bomb inside": {"model": executes(trap), "optimizer": 0, "scheduler": 0, "step": 0, "run": RUN},
                        "tensor": torch.zeros(3), "no run": {"model": {}}, "run is a list": dict.fromkeys(("model", "optimizer", "scheduler", "step", "run"), [])}.items():
        data = io.BytesIO()
        torch.save(value, data)
        yield name, data.getvalue()
        data = io.BytesIO()
        torch.save(value, data, _use_new_zipfile_serialization=False)
        yield f"{name}, old format", data.getvalue()
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("hello", "world")
    yield "another zip", data.getvalue()
    yield "empty", b""
    yield "garbage", random.Random(0).randbytes(5000)
    yield "text", b"#!/bin/sh\necho hello\n"


def test_files_that_are_no_snapshot(script, saved, tmp_path_factory, capsys):
    folder = tmp_path_factory.mktemp("traps")
    previous = load_snapshot(saved / "last.previous")
    for name, data in damaged_files(folder):
        (saved / "last").write_bytes(data)
        before = contents(saved)
        assert not differences(find(script, saved), previous), name
        assert capsys.readouterr().err.startswith("warning: "), name
        assert contents(saved) == before, name
        for path in saved.glob("last.damaged-*"):
            path.unlink()
    assert not list(folder.iterdir()), "a snapshot was executed"
    with pytest.raises(FileExistsError):  # the trap works: whoever unpickles it does execute it
        (folder / "executed").mkdir()
        torch.load(io.BytesIO(dict(damaged_files(folder))["bomb"]), weights_only=False)


def test_snapshot_of_another_run_is_refused(script, saved):
    before = contents(saved)
    for changed in ({"seed": 1}, {"script": "other"}, {"lr": 0.2}, {"model": "resnet50"}, {"batch_size": 4, "global_batch": 4}):
        with pytest.raises(script.UserError) as error:
            find(script, saved, **changed)
        name, value = next(iter(changed.items()))
        assert name in str(error.value) and str(value) in str(error.value) and "\n" not in str(error.value)
    assert contents(saved) == before


def test_snapshot_that_cannot_be_read_is_not_damaged(script, saved):
    """A disk or a network that fails for a moment: the run ends, and neither steps back nor moves the file aside."""
    (saved / "last").rename(saved / "kept")
    (saved / "last").symlink_to("/proc/self/mem")  # a file whose reading is an I/O error, for root, too
    with pytest.raises(script.UserError, match="last cannot be read .*Input/output error.*move it away"):
        find(script, saved)
    assert sorted(path.name for path in saved.iterdir()) == ["kept", "last", "last.previous"]


def test_snapshot_that_does_not_fit_into_memory_is_not_damaged(script, saved):
    script.save_snapshot(str(saved / "last"), 3, RUN, parts(3, width=2000))
    program = f"""import resource, sys
sys.argv, sys.path = ["it"], [{str(script_path("cpu_ddp").parent)!r}, *sys.path]
import train
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 2**24  # a third of the snapshot
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
train.find_snapshot({str(saved / "last")!r}, {RUN}, False)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert re.search("UserError: .*last cannot be read .*: start again", done.stderr), done
    assert find(script, saved)["step"] == 3


def test_previous_snapshot_of_another_run_does_not_stand_in(script, saved):
    (saved / "last").write_bytes(b"")
    before = contents(saved)
    with pytest.raises(script.UserError):
        find(script, saved, seed=1)
    assert contents(saved) == before


def test_kill_at_every_line_of_saving(script, saved):
    """A process that saves step 3 kills itself before each line of write_whole in turn: step 2 or step 3 is there, whole."""
    new, last = parts(3), saved / "last"
    originals = {path: path.read_bytes() for path in saved.iterdir()}
    code, found = script.write_whole.__code__, []
    for kill_at in range(1, 100):
        for path in saved.iterdir():
            path.unlink()
        for path, data in originals.items():
            path.write_bytes(data)
        pid = os.fork()
        if not pid:
            lines = 0

            def trace(frame, event, _):
                nonlocal lines
                if frame.f_code is code and event == "line":
                    lines += 1
                    if lines == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                return trace
            sys.settrace(trace)
            script.save_snapshot(str(last), 3, RUN, new)
            os._exit(0)
        killed = os.waitpid(pid, 0)[1] != 0
        state = find(script, saved)
        found.append(state["step"])
        assert not differences(state["model"], parts(state["step"])["model"].state_dict()), f"killed at line {kill_at}"
        script.save_snapshot(str(last), 3, RUN, new)  # and whoever goes on can save
        assert find(script, saved)["step"] == 3
        if not killed:
            break
    assert found[-1] == 3 and not killed
    # Between the two renames only last.previous is there: step 2. All the rest is step 2 before, step 3 after.
    assert found == sorted(found) and found.count(2) > 4, found


# --- the same by real runs ---
SHORT = ("--samples", "64", "--batch-size", "8", "--epochs", "4", "--save-every", "1")


def test_bad_snapshots_end_a_run_with_one_line(tmp_path):
    """Nine processes at once: each ends with one line of its own, soon, and leaves the file alone."""
    good = tmp_path / "good"
    assert run("cpu_ddp", *SHORT, "--checkpoint", good).status == 0
    bomb = tmp_path / "executed"
    bad = {"empty": b"", "garbage": os.urandom(3000), "truncated": good.read_bytes()[:1500]}
    data = io.BytesIO()
    torch.save(executes(bomb), data)
    bad["bomb"] = data.getvalue()
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "unreadable").symlink_to("unreadable")  # for root, too
    cases = [("cpu_ddp", name, ()) for name in bad] + [("cpu_ddp", "unreadable", ())] + [("cpu_ddp", "folder", ()), ("cpu_ddp", "good", ("--seed", "7")), ("cpu_ddp", "good", ("--batch-size", "16", "--lr", "0.5")),
                                                       ("synthetic_ddp", "good", ())]
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    jobs = [start(name, *(SHORT + flags), "--checkpoint", tmp_path / file) for name, file, flags in cases]
    try:
        for (name, file, flags), job in zip(cases, jobs):
            result = job.finish(60)
            assert result.status == 1, (name, file, flags)
            assert len(result.stderr.splitlines()) == 1 and len(result.errors) == 1, result.stderr
            assert str(tmp_path / file) in result.stderr
            assert "seed is 0 there, 7 here" in result.stderr or "7" not in flags
            assert ("move it away" if file == "unreadable" else "--fresh") in result.stderr or file == "folder"
    finally:
        for job in jobs:
            job.__exit__()
    assert not bomb.exists(), "a snapshot was executed"
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_weights_that_are_not_finite_are_not_saved(script, value, tmp_path):
    """Saved, they would be resumed for ever: the loss is looked at only about once a second. One weight is enough."""
    last = tmp_path / "last"
    for step in 1, 2:
        script.save_snapshot(str(last), step, RUN, parts(step))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    broken = parts(3)
    with torch.no_grad():
        next(broken["model"].parameters()).view(-1)[7] = value
    with pytest.raises(script.UserError, match="lower --lr.*--fresh"):
        script.save_snapshot(str(last), 3, RUN, broken)
    assert len(before) == 2 and {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_damaged_snapshot_falls_back_to_the_previous_one_on_all_workers(tmp_path):
    """A flipped bit, found by rank 0 alone; the run ends as if nothing had happened, and the damaged file is kept."""
    last, undisturbed = tmp_path / "last", tmp_path / "undisturbed"
    assert run("cpu_ddp", *SHORT, "--checkpoint", undisturbed, launcher="torchrun", workers=2).status == 0
    for name in ("", ".previous"):
        shutil.copy(f"{undisturbed}{name}", f"{last}{name}")
    weights = load_snapshot(last)["model"]["weight"].reshape(-1).view(torch.uint8)
    damaged = bytearray(last.read_bytes())
    damaged[damaged.index(bytes(weights.tolist())) + 5] ^= 16
    last.write_bytes(damaged)
    result = run("cpu_ddp", *SHORT, "--checkpoint", last, launcher="torchrun", workers=2)
    assert result.status == 0
    assert result.stderr.count("warning: ") == 1 and len(result.stderr.splitlines()) == 1
    assert "steps 12 to 16" in result.stdout
    assert not differences(last, undisturbed)
    assert [path.read_bytes() for path in tmp_path.glob("last.damaged-*")] == [damaged]


def test_fresh_starts_over(tmp_path):
    last = tmp_path / "last"
    assert run("cpu_ddp", *SHORT, "--checkpoint", last).status == 0
    again = run("cpu_ddp", *SHORT, "--checkpoint", last)
    assert again.status == 0 and "already finished" in again.stdout
    fresh = run("cpu_ddp", *SHORT, "--seed", "7", "--checkpoint", last, "--fresh")
    assert fresh.status == 0 and "steps 0 to 32" in fresh.stdout
    assert load_snapshot(last)["run"]["seed"] == 7
    wrong = run("cpu_ddp", *SHORT, "--seed", "7", "--checkpoint", last, launcher="torchrun", workers=3)
    assert wrong.status == 1 and len(wrong.errors) == 1 and "cannot be split" in wrong.errors[0]
    assert (tmp_path / "last.status").read_text() == "finished\n", "a mistake of the command, not of the run"


@pytest.mark.parametrize("name", ["mnist_dp", "fashionmnist_ddp"])
def test_fresh_and_killed(name, tmp_path):
    """A restart by Slurm or torchrun goes on with the new run, not with the old one."""
    last = tmp_path / "last"
    flags = ("--fake-data", 2000, "--batch-size", 100, "--epochs", 1, "--log-every", 1, "--checkpoint", last)
    assert run(name, *flags).status == 0
    with start(name, *flags, "--fresh") as job:
        job.wait_for("\nstep 2/")
        job.send(signal.SIGKILL)
        job.finish(30)
    again = run(name, *flags, "--fresh", env={"SLURM_RESTART_COUNT": "1"})
    assert again.status == 0 and "steps 0 to" in again.stdout, again


# --- disks ---
IN_NAMESPACE = """
mount -t tmpfs -o size=1m none "$1"          # the copies go to $2, outside of it
cd "$1"
"${@:3}" --checkpoint last &
until [[ -e last.previous ]]; do sleep 0.1; done
{action}
wait $! && status=0 || status=$?
cp last last.previous last.status "$2"
[[ ! -e last.tmp ]] || touch "$2/left.tmp"
exit $status
"""


@pytest.mark.parametrize("disk, action, reason", [
    ("full", "cat /dev/zero >fill 2>/dev/null || true", "No space left"),
    ("read-only", "until mount -o remount,ro . 2>/dev/null; do sleep 0.01; done", "Read-only file system"),
])
def test_disk_that_takes_no_more(disk, action, reason, tmp_path):
    """A tmpfs of its own that gets full, or read-only, in the middle: one line, and the last good snapshot is whole."""
    unshare = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True, timeout=30).returncode:
        pytest.skip("needs user namespaces: sudo sysctl kernel.unprivileged_userns_clone=1")
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    kept.mkdir()
    flags = ["--epochs", "100000", "--save-every-steps", "20", "--save-every", "100000"]
    command = [*unshare, "bash", "-euc", IN_NAMESPACE.replace("{action}", action), "bash", disk, kept,
               sys.executable, script_path("cpu_ddp"), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1, result.stderr
    errors = result.stderr.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ") and reason in errors[0] and "--checkpoint" in errors[0]
    assert (kept / "last.status").read_text() == "running\n", "a crash, not a preemption: it would fail again"
    assert not (kept / "left.tmp").exists(), "half a snapshot fills the disk"
    steps = [load_snapshot(kept / name)["step"] for name in ("last", "last.previous")]
    assert steps[0] == steps[1] + 20
    resumed = run("cpu_ddp", "--epochs", steps[0] // 64 + 1, "--checkpoint", kept / "last")
    assert resumed.status == 0 and f"steps {steps[0]} to" in resumed.stdout


def test_checkpoint_that_can_never_be_written(tmp_path):
    (tmp_path / "file").touch()
    result = run("synthetic_ddp", "--checkpoint", tmp_path / "file" / "last", launcher="torchrun", workers=2)
    assert result.status == 1
    assert len(result.errors) == len(result.stderr.splitlines()) == 1 and "cannot be written" in result.errors[0]
