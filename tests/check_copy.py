# SPDX-License-Identifier: MIT-0
"""Check an edited copy of a DDP script of this collection, on CPUs, in about half a minute.

    python check_copy.py my.py [flags of my.py]

The check trains my.py for two epochs on a few of its own samples: on one process, on two, and
stopped and resumed. It compares data, gradients, weights and results, and says what differs.
Start it in the folder in which my.py finds its data.

Your files: my.py works in a temporary folder, which has copies of your files of up to 1 MB (16 MB
in all), and links to larger ones. What changes a copy, or removes a file, changes nothing of yours.
What Python would write to a linked file, to an absolute path or to ~ is refused. A program that
my.py starts, or a library that writes files without Python, can change these: the check only says
afterwards that a linked file has changed. This was tried on Linux.

It does not see: later epochs, other samples, GPUs, whether the model learns; results that rank 0
computes from its share and only logs; files to which all ranks append; the names (module.) in a
file that my.py saves by itself; an optimizer.step() after several batches, each with zero_grad().

Exit status: 0 if all is ok, 1 after a FAIL, 2 if my.py cannot be checked.
"""
import contextlib
import json
import linecache
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile

import scratch
from check_promises import (TRAINING_SAMPLES, VAL_SAMPLES, Record, check_data, check_ends,
                            check_evaluation, check_leak, check_loss, check_ranks, check_resume,
                            check_steps, notes, said, say_the_rest, skip, some)

WAIT = 60  # seconds: a process that computes nothing for longer waits for another


class Servers:
    """Two interpreters that train copies (watch_copy.py): as on two machines, of a rank each."""

    def __init__(self, folder):
        others = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "SLURM_", "PMI",
                  "OMPI_", "PET_", "TORCHELASTIC_", "GLOO_", "PYTHONHASHSEED")  # of another job
        env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        env.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", WANDB_MODE="disabled",
                   PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(folder),
                   TORCH_DISTRIBUTED_DEBUG="INFO")  # names the parameters that have no gradient
        command = [sys.executable, os.path.join(os.path.dirname(os.path.realpath(__file__)),
                                                "watch_copy.py")]
        self.processes = [subprocess.Popen(command, env=env, stdin=subprocess.PIPE, text=True,
                                           stdout=subprocess.PIPE, start_new_session=True)
                          for _ in range(2)]

    def do(self, jobs, **common):
        """Do the jobs (orders), and return their records and how the others ended, by name."""
        waiting = [[], []]
        for job in jobs:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            for rank in range(job["size"]):
                number = rank if job["size"] > 1 else job.get("server", 0)
                order = {"checkpoint": job["root"], "stop": 0, "args": {}, **common, **job,
                         "rank": rank, "port": port}
                waiting[number].append((job["name"], rank))
                with contextlib.suppress(BrokenPipeError):  # its error is printed
                    print(json.dumps(order), file=self.processes[number].stdin, flush=True)
        statuses = {}
        for process, names in zip(self.processes, waiting):
            for name in names:
                statuses[name] = json.loads(process.stdout.readline() or '"lost"')
        return read_records(jobs, statuses, common["folder"], common["path"])

    def end(self):
        for process in self.processes:
            process.terminate()  # it ends what it has started
            process.wait()


def read_records(jobs, statuses, folder, path):
    seen, problems = {}, {}
    for job in jobs:
        names = [f"{folder}/{job['name']}-{rank}" for rank in range(job["size"])]
        files = [pathlib.Path(f"{name}.json") for name in names]
        if all(file.exists() for file in files):
            seen[job["name"]] = [Record(**json.loads(file.read_text())) for file in files]
            continue
        ends = [how_it_ended(path, statuses[job["name"], rank], f"{name}.log")
                for rank, name in enumerate(names)]
        problems[job["name"]] = "".join(f"\n      rank {rank} {end}"
                                        for rank, end in enumerate(ends))
    return seen, problems


def how_it_ended(path, status, log):
    """Return how a process has ended, and in which lines of the copy."""
    text = pathlib.Path(log).read_text(errors="replace") if os.path.exists(log) else ""
    ends = {0: "has ended", "limit": "takes too long",
            "lost": "has not begun: see the error above, or the memory"}
    if status in ends:
        return ends[status]
    waits = "Timeout (" in text  # faulthandler's word
    stack = text.rpartition("(most recent call")[2]
    if "\nOriginal Traceback" in text:  # of a loader process, behind that of this process
        stack = re.split("^Traceback", text, flags=re.MULTILINE)[-1]
    if status < 0 and not waits:
        name = signal.Signals(-status).name
        return f"was killed by {name}" + (": is there too little memory?" if name == "SIGKILL"
                                          else f" after:\n        {text.strip()[-300:]}")
    errors = re.findall(r"^(?:[\w.]+Error|SystemExit|error|Parameters which).*|^\S+: error: .*",
                        text if "SystemExit" in stack else stack, re.M)
    frames = re.findall(rf'File ".*{re.escape(path)}", line (\d+)(?:,? in (\w+))?', stack)
    lines = ["waits in" if waits else "ends with an error in"]
    for number, name in [frame for frame in frames if frame[1]] or frames[-1:]:
        place = f"line {number}, {name}()" if name else f"line {number}"
        lines.append(f"{place}: {linecache.getline(path, int(number)).strip()}")
    if "in collate_tensor_fn" in stack:
        lines.append("samples of one batch have different shapes")
    lines += [] if waits else errors[-2:] or stack.splitlines()[-3:]
    return "\n        ".join(line[:400] for line in lines)


def main():
    """Return the exit status."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        print(__doc__)
        return 0 if sys.argv[1:] else 2
    path = os.path.realpath(sys.argv[1])
    reason = why_not(path)
    if reason:
        skip(sys.argv[1], reason)
        return 2
    try:
        with contextlib.ExitStack() as ends:
            # Paths of sockets of loader processes (44 more characters here) have 103 at most
            short = "/tmp" if len(os.path.realpath(tempfile.gettempdir())) > 59 else None
            folder = ends.enter_context(tempfile.TemporaryDirectory(dir=short,
                                                                    ignore_cleanup_errors=True))
            servers = Servers(folder)
            ends.callback(servers.end)
            return compare(servers, os.path.realpath(folder), path, sys.argv[2:])
    except KeyboardInterrupt:
        skip("the rest", "interrupted")
        return 2


def why_not(path):
    """Return why a file is no copy of a script of this version, or ''."""
    if not os.path.isfile(path):
        return "there is no such file"
    text = pathlib.Path(path).read_text(errors="replace")
    for name in ("parse_args", "load_data", "train"):
        if not re.search(rf"\b{name}\b", text):
            return (f"it has no function {name}, so it is no copy of a DDP script of this "
                    "collection")
    if re.search(r"def (loss_and_correct|results_of|restore|check_weights)\(", text) and \
            "progress" not in text:
        return "it is a copy of an older version: use the check_copy.py of its version"
    return ""


def compare(servers, folder, path, flags):
    """Train, print what holds and what differs, and return the exit status."""
    said.clear()
    notes.clear()
    mirror, common = make_mirror(folder, path, flags)
    seen, problems = train_copies(servers, folder, common)
    if seen:
        print_promises(seen, problems)
    changed = mirror.changed()
    if changed:
        notes.append("these linked files have changed during the check, by a program, or by a "
                     f"library that writes without Python: {some(changed)}")
    say_the_rest()
    return 2 if not seen else 1 if "FAIL" in said else 2 if "broken" in problems else 0


def make_mirror(folder, path, flags):
    """Mirror the user's folders, say it, and return the Mirror and what all orders have."""
    here, beside = os.getcwd(), os.path.dirname(path)
    mirror = scratch.Mirror(f"{folder}/base")
    mirror.add(here)
    if not f"{beside}/".startswith(f"{here}/"):
        mirror.add(beside)
    others = scratch.Mirror(f"{folder}/base", most=2000)
    others.add(os.path.dirname(here), levels=1)
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    homes = {"TORCH_HOME": f"{cache}/torch", "HF_HOME": f"{cache}/huggingface"}
    homes = {name: os.path.realpath(os.environ.get(name, place)) for name, place in homes.items()}
    for place in filter(os.path.isdir, homes.values()):
        others.add(place)
    names = [os.path.relpath(path) for path in mirror.linked]
    links = f"and links to {len(names)} ({some(names)})" if names else "and no links"
    print(f"""\
Training {sys.argv[1]} on CPUs, at first on one process: two epochs of 3 steps of 16 samples, of
{TRAINING_SAMPLES} training samples, and of {VAL_SAMPLES} validation samples if there are any.
It works in a temporary folder, with copies of {mirror.copied} of your files {links}. Python
cannot change what is linked, at an absolute path or in ~; programs that it starts, and libraries
that write without Python, can.""", flush=True)
    return mirror, {"folder": folder, "path": path, "here": here, "flags": flags, "homes": homes}


def train_copies(servers, folder, common):
    """Return what was seen in each job, and how the others ended. No job: it cannot be checked."""
    def job(kind, name, size=1, **more):
        root = more.get("root", name)
        if not os.path.exists(f"{folder}/{root}"):
            scratch.clone(f"{folder}/base", f"{folder}/{root}")
        return {"kind": kind, "name": name, "size": size, "root": root, **more}

    first = {**common, "wait": 900, "limit": 1800}
    seen, problems = servers.do([job("Preparation", "preparation", root="base")], **first)
    if not problems:
        common["args"] = seen["preparation"][0].args
        seen, problems = servers.do([job("Training", "one"), job("Data", "data", server=1)],
                                    **{**first, **common})
    for name in [*problems]:
        reason = ("it would change a file at an absolute path, in ~, or one that is linked. Open "
                  "data for reading alone, and write to new files at relative paths"
                  if scratch.REFUSED in problems[name] else
                  "SyncBatchNorm needs GPUs: check with BatchNorm"
                  if "SyncBatchNorm" in problems[name] else
                  f"one process cannot train to the end (on a CPU, {TRAINING_SAMPLES} samples)")
        skip("anything", f"{reason}:{problems[name]}")
        return {}, {}
    one = seen["one"][0]
    if not one.steps:
        skip("anything", "train() has made no step of an optimizer")
        return {}, {}
    print(f"Now on two processes, and stopped and resumed: about {7 * one.seconds:.0f} s more (if "
          f"the processes wait for each other, {WAIT} s more).", flush=True)
    steps = len(one.steps)
    stop = min(steps * 2 // 3, steps - 2)
    jobs = [job("Training", "two", 2), job("Data", "data of two", 2),
            job("Gradients", "gradients of two", 2),
            job("Loss", "loss"), job("Gradients", "gradients"),
            job("Stop", "stopped", server=1, stop=stop if stop > steps // 2 else steps // 2 + 1),
            job("Training", "resumed", server=1, root="stopped")]
    if one.evaluations:
        jobs[3:3] = [job("Evaluation", "evaluation of two", 2)]
        jobs.append(job("Evaluation", "evaluation"))
    wait = WAIT + one.seconds
    others, problems = servers.do(jobs, **common, wait=wait, limit=4 * wait)
    return {**seen, **others}, problems


def print_promises(seen, problems):
    """Print which promises hold, and what else ended with an error."""
    if not check_data(seen):
        skip("the rest", "it would differ, too")
        return
    check_leak(seen)
    check_ends(seen, problems)
    if "two" in seen:
        check_ranks(seen)
    in_evaluation, in_training = check_loss(seen, problems)
    if "two" in seen:
        check_steps(seen, in_training)
    check_evaluation(seen, in_evaluation)
    check_resume(seen, problems)
    broken = [name for name in ("data of two", "evaluation", "evaluation of two")
              if name in problems and "two" in seen]
    if broken:
        skip("the rest", f"{broken[0]} ends with an error:{problems[broken[0]]}")
        problems["broken"] = True


if __name__ == "__main__":
    sys.exit(main())
