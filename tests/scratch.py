# SPDX-License-Identifier: MIT-0
"""The processes and the temporary folder in which check_copy.py lets a copy work.

This file knows nothing of torch. An interpreter takes orders, and forks a process for each. A
user's folder is mirrored by real folders, copies of small files, and links to the others. Then
whatever changes a copied file, or removes what is in a folder, changes the mirror alone. Guard
refuses what Python would write through a link, or outside the temporary folder.
"""
import argparse
import collections
import contextlib
import dataclasses
import errno
import faulthandler
import importlib.util
import json
import linecache
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

SMALL, IN_ALL = 2**20, 16 * 2**20  # bytes: larger files are linked, and all that exceed the sum
MOST = 10000  # entries in all folders, above which folders are linked


# ---- Processes ----
@dataclasses.dataclass
class Record:
    """What is seen in one process of one job. Digests are texts."""
    # Of each step of an optimizer: rates (and its other options), norms of the gradients by name,
    # and of the calls of the loss before it: losses, rows (digests of a sample, and of each of its
    # parts), and shapes (of a sample's parts)
    steps: list = dataclasses.field(default_factory=list)
    # Of each call of evaluate(): results, whether random numbers are drawn in it (draws), and
    # whether a layer of dropout is in training mode (dropout)
    evaluations: list = dataclasses.field(default_factory=list)
    # Of each data set: size, and digests of 20 samples, and of more that are read in time
    data: list = dataclasses.field(default_factory=list)
    # Of each mode (evaluation, training): losses of 10 samples, of the first 3 and the other 7, and
    # whether it varies: random numbers are drawn, or buffers change (of BatchNorm, by the batch)
    loss: dict = dataclasses.field(default_factory=dict)
    # Digests of trained weights, and of what else is in saved and progress, at the end
    state: dict = dataclasses.field(default_factory=dict)
    args: dict = dataclasses.field(default_factory=dict)  # numbers among the copy's settings
    tolerance: float = 1e-3  # of relative differences by rounding
    found_file: bool = False  # that of --checkpoint, at the start
    saved: bool | None = None  # it is there at the end. None: resume() is not called
    stopped: bool = False  # by SIGTERM
    seconds: float = 0.0


class Servers(contextlib.AbstractContextManager):
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
        jobs = [{"size": 1, "server": 0, "root": job["name"], **job} for job in jobs]
        for job in jobs:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            clone(f"{common['folder']}/base", f"{common['folder']}/{job['root']}")
            for rank in range(job["size"]):
                number = rank if job["size"] > 1 else job["server"]
                order = {"stop": 0, "args": {}, **common, **job, "rank": rank, "port": port}
                waiting[number].append((job["name"], rank))
                with contextlib.suppress(BrokenPipeError):  # its error is printed
                    print(json.dumps(order), file=self.processes[number].stdin, flush=True)
        statuses = {name: json.loads(process.stdout.readline() or '"lost"')
                    for process, names in zip(self.processes, waiting) for name in names}
        return read_records(jobs, statuses, common["folder"], common["path"])

    def __exit__(self, *_):
        for process in self.processes:
            process.terminate()  # it ends what it has started
            process.wait()


def read_records(jobs, statuses, folder, path):
    """Return the Records of the jobs that have ended well, and how the others ended, by name."""
    seen, problems = {}, {}
    for job in jobs:
        names = [f"{folder}/{job['name']}-{rank}" for rank in range(job["size"])]
        files = [pathlib.Path(f"{name}.json") for name in names]
        if all(file.exists() for file in files):
            seen[job["name"]] = [Record(**json.loads(file.read_text())) for file in files]
        else:
            problems[job["name"]] = "".join(
                f"\n      rank {rank} "
                + how_it_ended(path, statuses[job["name"], rank], f"{name}.log")
                for rank, name in enumerate(names))
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
    if status < 0 and not waits:
        name = signal.Signals(-status).name
        reason = " (is there too little memory?)" if name == "SIGKILL" else ""
        return f"was killed by {name}{reason} after:\n        {text.strip()[-300:]}"
    errors = re.findall(r"^(?:[\w.]+Error|SystemExit|\tWeights|error|Parameters which).*|"
                        r"^\S+: error: .*", text if "SystemExit" in stack else stack, re.M)
    frames = re.findall(rf'File ".*{re.escape(path)}", line (\d+)(?:,? in (\w+))?', stack)
    lines = ["waits in" if waits else "ends with an error in"]
    for number, name in [frame for frame in frames if frame[1]] or frames[-1:]:
        place = f"line {number}, {name}()" if name else f"line {number}"
        lines.append(f"{place}: {linecache.getline(path, int(number)).strip()}")
    lines += [] if waits else errors[-2:] or stack.splitlines()[-3:]
    return "\n        ".join(line.strip()[:400] for line in lines)


def serve(work):
    """Do the orders one after the other. After each, print the status of its process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    os.chdir("/")
    sys.path.remove(os.path.dirname(os.path.realpath(__file__)))
    del sys.modules["scratch"]  # the copy may have a module of this name
    with contextlib.suppress(SystemExit):  # of the signal
        for line in sys.stdin:
            order = argparse.Namespace(**json.loads(line))
            pid = os.fork()
            if not pid:
                do_order(order, work)
            print(json.dumps(wait_for(pid, order.limit)), flush=True)
    os._exit(0)  # at once: an interpreter with PyTorch takes a second to end


def wait_for(pid, seconds):
    """Return the status of a process, which may take so many seconds. End what it has started."""
    end, parent = time.monotonic() + seconds, os.getppid()
    ended = 0
    try:
        while not ended and time.monotonic() < end and os.getppid() == parent:
            time.sleep(0.02)
            ended, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else "limit"
    finally:
        if not ended:
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # its loader processes


def do_order(order, work):
    """Make this process one that a launcher has started, call work(order), and end it."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdin = open(os.devnull)
    sys.stdout = sys.stderr = open(f"{order.folder}/{order.name}-{order.rank}.log", "w",
                                   buffering=1)
    for number in (1, 2):
        os.dup2(sys.stdout.fileno(), number)
    root = f"{order.folder}/{order.root}"
    status = 1
    try:
        os.environ.update(RANK=str(order.rank), WORLD_SIZE=str(order.size), LOCAL_RANK="0",
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(order.port),
                          TMPDIR=order.folder,
                          **{name: root + place for name, place in order.homes.items()})
        tempfile.tempdir = order.folder
        os.chdir(root + order.here)
        sys.argv = [order.path, *order.flags]
        sys.path.insert(0, os.path.dirname(root + order.path))
        sys.addaudithook(Guard(order.folder).see)
        work(order)
        status = 0
    except BaseException:
        faulthandler.cancel_dump_traceback_later()  # a dump that has begun is completed
        traceback.print_exc()
    os._exit(status)


def load(path):
    """Return the copy as a module."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # to pickle its functions and classes
    spec.loader.exec_module(module)
    return module


# ---- The folder ----
class Mirror:
    """Mirrors folders of the user beneath root, at the same absolute paths."""

    def __init__(self, root, most=MOST):
        self.root = root
        self.room, self.entries = IN_ALL, most
        self.copied = 0  # files
        self.linked = {}  # what is linked, and its state, to see that it changes
        self.real = {}  # folders that are mirrored: their real paths, and where they are

    def add(self, place, levels=50):
        """Mirror a folder, and so many levels of folders in it: the upper ones first."""
        queue = collections.deque([(place, self.root + place, levels)])
        while queue:
            folder, mirror, levels = queue.popleft()
            self.real.setdefault(os.path.realpath(folder), mirror)
            os.makedirs(mirror, exist_ok=True)
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:  # it may not be read
                continue
            self.entries -= len(entries)
            for entry in entries:
                new = f"{mirror}/{entry.name}"
                real = os.path.realpath(entry.path)
                if entry.name == "__pycache__":
                    continue
                if levels and self.takes(entry, real):
                    self.real[real] = new
                    queue.append((entry.path, new, levels - 1))
                elif not os.path.lexists(new) and not self.copy(entry, new):
                    if real in self.real:  # as latest -> runs/5: clones have the link, too
                        os.symlink(os.path.relpath(self.real[real], mirror), new)
                        continue
                    os.symlink(real, new)
                    self.linked[entry.path] = state(entry.path)

    def takes(self, entry, real):
        """Return whether a folder is mirrored: not an environment or repository, and only once."""
        return (entry.is_dir() and self.entries > 0 and not entry.name == ".git"
                and not os.path.exists(f"{entry.path}/pyvenv.cfg")
                and real not in self.real and real != os.path.dirname(self.root))

    def copy(self, entry, new):
        """Copy a small file to new. Return whether it is copied."""
        try:
            size = entry.stat().st_size
            if not entry.is_file() or size > min(SMALL, self.room):
                return False
            shutil.copy2(entry.path, new)
        except OSError:  # it may not be read, or is gone
            return False
        self.room -= size
        self.copied += 1
        return True

    def changed(self):
        """Return the linked files that have changed, and folders: their entries, not what is in."""
        return [path for path, before in self.linked.items() if before and state(path) != before]


def mirror_folders(folder, beside):
    """Mirror the current folder, the one of my.py (beside), and caches of weights.

    Return the Mirror of the first two, and where a copy finds them.
    """
    here = os.getcwd()
    mirror = Mirror(f"{folder}/base")
    mirror.add(here)
    if not f"{beside}/".startswith(f"{here}/"):
        mirror.add(beside)
    others = Mirror(f"{folder}/base", most=2000)
    others.real = mirror.real
    others.add(os.path.dirname(here), levels=1)
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    homes = {"TORCH_HOME": f"{cache}/torch", "HF_HOME": f"{cache}/huggingface"}
    homes = {name: os.path.realpath(os.environ.get(name, place)) for name, place in homes.items()}
    for place in filter(os.path.isdir, homes.values()):
        others.add(place)
    return mirror, {"here": here, "homes": homes}


def state(path):
    """Return what shows that a file has changed."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def clone(root, new):
    """Make another mirror like the one at root, if there is none. Large files are linked."""
    def copy_or_link(path, copy):
        if os.path.getsize(path) > SMALL:
            os.symlink(path, copy)
        else:
            shutil.copy2(path, copy)

    if not os.path.exists(new):
        shutil.copytree(root, new, symlinks=True, copy_function=copy_or_link)


# ---- What is refused ----
REFUSED = "the check refuses to change what is not in its temporary folder"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Python's audit events that change a folder, or a file: which of their arguments are paths
OF_FOLDERS = {"os.remove": (0,), "os.rmdir": (0,), "os.mkdir": (0,), "os.rename": (0, 1),
              "os.link": (0, 1), "os.symlink": (1,), "shutil.rmtree": (0,)}
OF_FILES = {"os.truncate": (0,), "os.utime": (0,), "os.chmod": (0,), "os.chown": (0,)}


class Guard:
    """Refuses, in this process, what Python would change outside a folder (and /dev, /proc)."""

    def __init__(self, folder):
        self.free = [folder, "/dev", "/proc"]

    def see(self, event, arguments):
        """The hook: raise PermissionError unless what an event changes may be changed."""
        if event == "open" and (arguments[2] or 0) & WRITES:
            self.check(arguments[0], replaces=arguments[2] & os.O_TRUNC)
        for number in OF_FOLDERS.get(event, ()):
            if event != "os.mkdir" or not os.path.lexists(arguments[0]):  # makedirs() tries it
                self.check(arguments[number], follow=False)
        for number in OF_FILES.get(event, ()):
            self.check(arguments[number])

    def check(self, path, follow=True, replaces=False):
        """Raise PermissionError unless path may be changed. follow: the file that it links to.

        replaces: if path is a link, a new file takes its place.
        """
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # the number of an open file
        path = os.path.join(os.getcwd(), os.fsdecode(path)).rstrip("/")
        own = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        target = os.path.realpath(own) if follow else own
        if self.is_free(own) and self.is_free(target):
            return
        if not (self.is_free(own) and replaces and os.path.isfile(target)):
            raise PermissionError(errno.EACCES, REFUSED, target)
        with contextlib.suppress(FileNotFoundError):  # another rank has done it
            os.unlink(own)  # the link

    def is_free(self, path):
        return any(f"{path}/".startswith(f"{place}/") for place in self.free)
