# SPDX-License-Identifier: MIT-0
"""Check an edited copy of cifar10_ddp, fashionmnist_ddp or cpu_ddp, on CPUs, in half a minute.

    python check_copy.py my.py [flags of my.py]

It trains my.py for two epochs on a few of its own samples: on one process, on two, and on one that
is stopped and resumed. Then it compares data, gradients, weights and test results, and says what
differs. Start it in the folder in which my.py finds its data. What my.py saves by PyTorch goes to
temporary files.

Exit status: 0 if all is ok, 1 after a FAIL, 2 if my.py cannot be checked.
"""
import collections
import contextlib
import ctypes
import errno
import faulthandler
import fcntl
import functools
import hashlib
import importlib.util
import json
import linecache
import math
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import traceback

TRAINING_SAMPLES, TEST_SAMPLES = 54, 23  # 3 steps of 16 samples in an epoch; 6 are left out
SETTINGS = {"epochs": 2, "global_batch": 16, "workers": 1, "nproc": None, "log_every": 1e9,
            "save_every": 1e9, "timeout": 1800}
WAIT = 60  # seconds: a process that computes nothing for longer waits for another
FORBIDDEN = "the check forbids to change an absolute path; use a relative path"
# A call of the copy's train(). checkpoint: the name of the job that writes it
Job = collections.namedtuple("Job", "name checkpoint batch_size end", defaults=(4, "last step"))


# ---- In each process that trains ----
def process(path, here, folder, rank, wait, jobs, flags):
    """Call the copy's train() for each job, and write what was seen in it."""
    global torch
    import torch  # not in the process that compares: it takes two seconds
    own_folder = os.path.dirname(os.path.realpath(__file__))
    places = [place for place in sys.path if place != own_folder]
    sys.argv = [path, *flags]
    with contextlib.suppress(AttributeError, PermissionError):
        os.setsid()  # loader processes end with this one
    if sys.platform == "linux":
        torch.multiprocessing.set_start_method("fork", force=True)
    tempfile.tempdir = folder
    files = Files(folder)
    steps = 0  # of the job before
    status = 0
    for number, job in enumerate(map(Job._make, jobs)):
        sys.stdout = sys.stderr = open(f"{folder}/{job.name}-{rank}.log", "w", buffering=1)
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(1, 2)
        mirror = f"{folder}/{job.checkpoint}"  # of the whole tree of folders: ../data, too
        try:
            os.chdir(mirror + here)
            files.own(mirror + path)  # a file beside __file__ is one of the temporary folder, too
            sys.path[:] = [os.path.dirname(mirror + path), *places]
            module = load(mirror + path)  # anew: no job finds the globals of the one before
            if job.name == "one":
                files.download(module, here)
                for other in jobs:
                    make_links(f"{folder}/{other[1]}", here)
                os.chdir(mirror + here)
            if number == 0:
                files.forbid_the_rest()
            seen = train(module, folder, wait, job, steps)
            steps = len(seen["steps"])
            pathlib.Path(f"{folder}/{job.name}-{rank}.json").write_text(json.dumps(seen))
        except BaseException:
            traceback.print_exc()
            status = 1
            if job.name in ("one", "two"):
                break
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's would raise an error
            for child in torch.multiprocessing.active_children():
                child.kill()  # loader processes ignore other signals
    os._exit(status)


def load(path):
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # to pickle its functions and classes
    spec.loader.exec_module(module)
    return module


class FirstStep(BaseException):
    """Ends a training before its first step."""


def train(module, folder, wait, job, steps):
    """Call the copy's train(). Return what was seen in it, as numbers and text."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    seen = {"steps": [], "evaluations": [], "stopped": False, "draws": False, "changes": False}
    functions = dict(vars(module))
    calls = []  # of the loss, of which the next step is made: results and batches
    sets, saved, trained, evaluating, first_buffers = [], {}, {}, [], []

    def sign_of_life():
        """After so many seconds without another one, print where each thread is, and end."""
        faulthandler.dump_traceback_later(wait, exit=True)

    def load_few(args):
        loaded = functions["load_data"](args)
        sets[:] = [loaded] if are_tensors(loaded) else loaded
        shortened = [few(data, TEST_SAMPLES if number else TRAINING_SAMPLES)
                     for number, data in enumerate(sets)]
        return shortened[0] if are_tensors(loaded) else shortened

    def see_restore(checkpoint, settings, parts, *rest):
        saved["parts"] = parts
        return functions["restore"](checkpoint, settings, parts, *rest)

    def begin_with_the_first_buffers(model):
        """Undo what the parts before have done: on two processes, each computes half of them."""
        buffers = [*getattr(model, "buffers", list)()]
        if not calls:
            first_buffers[:] = [buffer.clone() for buffer in buffers]
        for buffer, first in zip(buffers, first_buffers):
            if digest(buffer) != digest(first):  # of BatchNorm, a queue, spectral_norm
                buffer.copy_(first)

    def see_loss(model, *batch, **options):
        sign_of_life()
        if not seen["steps"] and not evaluating and job.name != "resumed":
            begin_with_the_first_buffers(model)
        before = random_numbers()
        if job.end == "first step in eval()":
            model.eval()
        result = functions[loss_name](model, *batch, **options)
        if evaluating or job.end == "first step in eval()":
            seen["draws"] |= random_numbers() != before
        if torch.is_grad_enabled() and not evaluating:
            calls.append((floats(result), digest(batch)))
        return result

    def see_evaluation(model, *arguments, **options):
        buffers = getattr(model, "buffers", list)
        before = digest([*buffers()])
        evaluating.append(True)
        result = functions["evaluate"](model, *arguments, **options)
        evaluating.pop()
        seen["evaluations"].append(floats(result))
        seen["changes"] |= digest([*buffers()]) != before
        return result

    def before_step(optimizer, *_):
        sign_of_life()
        names = {id(weight): name for name, weight in weights(saved.get("parts", {})).items()}
        own = {names.get(id(weight), f"weight {number} (in no model of saved)"): weight
               for group in optimizer.param_groups for number, weight in enumerate(group["params"])}
        trained.update(own)
        norms = {name: weight.grad.detach().to_dense().double().norm().item()
                 for name, weight in own.items() if weight.grad is not None}
        rates = [number for group in optimizer.param_groups for name, value in sorted(group.items())
                 if name != "params" for number in floats(value)]  # and the other options
        seen["steps"].append({"losses": [losses for losses, _ in calls], "rates": rates,
                              "batches": [batch for _, batch in calls], "norms": norms})
        calls.clear()
        if job.end.startswith("first step"):
            raise FirstStep
        # In the second epoch. The run stops after the step that follows
        if job.end == "signal" and len(seen["steps"]) == min(steps * 2 // 3, steps - 2):
            os.kill(os.getpid(), signal.SIGTERM)

    loss_name = "loss_of" if "loss_of" in functions else "loss_and_correct"
    seeing = {"load_data": load_few, "restore": see_restore, loss_name: see_loss,
              "evaluate": see_evaluation}
    vars(module).update({name: see for name, see in seeing.items() if name in functions})
    module.CHECK_EVERY = 1
    args = module.parse_args()
    settings = {**SETTINGS, "batch_size": job.batch_size,
                "checkpoint": f"{folder}/{job.checkpoint}.pt",
                "lr": 0.01 * getattr(args, "lr", 1)}  # no copy diverges in small batches
    vars(args).update({name: value for name, value in settings.items() if hasattr(args, name)})
    here = os.getcwd().removeprefix(f"{folder}/{job.checkpoint}")
    for name, value in vars(args).items():
        if isinstance(value, str) and is_beneath(value, here):  # what the copy made absolute
            setattr(args, name, f"{folder}/{job.checkpoint}{value}")
    hook = register_optimizer_step_pre_hook(before_step)
    sign_of_life()
    try:
        module.train(args)
    except (SystemExit, FirstStep):
        if job.end == "last step":
            raise
        seen["stopped"] = True
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        hook.remove()
        faulthandler.cancel_dump_traceback_later()
    parts = saved.get("parts", {})
    seen["end"] = {f"{name}{place}": value for name, part in parts.items()
                   for place, value in numbers(part.state_dict()).items()}
    trained.update(weights(parts))
    seen["weights"] = {name: digest(part) for name, part in trained.items() if part.requires_grad}
    if job.name in ("one", "two", "resumed"):
        # Now: the loader's processes would share a file that is opened before they start
        seen["sizes"] = [size(data) for data in sets]
        seen["samples"] = [read(data, 20) for data in sets]
    if job.name == "one":
        seen["many"] = [read(data, size(data) if are_tensors(data) else 300) for data in sets]
    return seen


# ---- Files: a copy works in a temporary folder of links to the user's files ----
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events that change a folder, or what is in a file or folder: which arguments are paths
OF_FOLDERS = {"os.remove": (0,), "os.rmdir": (0,), "os.mkdir": (0,), "os.rename": (0, 1),
              "os.link": (1,), "os.symlink": (1,)}
OF_CONTENTS = {"os.truncate": (0,), "os.utime": (0,), "os.chmod": (0,), "os.chown": (0,),
               "os.link": (0,), "shutil.rmtree": (0,), "sqlite3.connect": (0,)}
OF_PROGRAMS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen")


def make_links(mirror, here):
    """Make folders of links, so that mirror + path leads to the file at path."""
    inner = None
    for place in (here, *map(str, pathlib.Path(here).parents)):
        os.makedirs(mirror + place, exist_ok=True)
        with contextlib.suppress(PermissionError):
            for entry in os.scandir(place):
                link = os.path.join(mirror + place, entry.name)
                if entry.path != inner and not os.path.lexists(link):
                    os.symlink(entry.path, link)
        inner = place


def is_beneath(path, folder):
    return f"{path}/".startswith(f"{folder}/")


class Files:
    """Sees what Python is going to write: puts it into the temporary folder, or forbids it."""

    def __init__(self, folder):
        self.folder = folder
        cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
        caches = [os.environ.get(name, cache) for name in ("TORCH_HOME", "HF_HOME")]
        self.free = [folder, "/dev", *{os.path.realpath(cache) for cache in [cache, *caches]}]
        self.begin_of_download = None
        sys.addaudithook(self.see)
        for module in (torch, torch.jit):  # in C++: no audit event
            module.save = functools.partial(self.save, module.save)

    def save(self, save, *arguments, **options):
        path = options.get("f", arguments[-1])
        if isinstance(path, (str, os.PathLike)):
            self.own(path, keep=False)
        return save(*arguments, **options)

    def see(self, event, arguments):
        if event == "open" and (arguments[2] or 0) & WRITES:
            self.own(arguments[0], keep=not arguments[2] & os.O_TRUNC)
        for number in OF_FOLDERS.get(event, ()):
            self.own(arguments[number], content=False)
        for number in OF_CONTENTS.get(event, ()):
            self.own(arguments[number])
        if event in OF_PROGRAMS:  # cp last.pt best.pt
            for word in re.findall(r"[^\s'\",()\[\]]+", str(arguments[:2])):
                if is_beneath(os.path.abspath(word), self.folder) and os.path.lexists(word):
                    self.own(word)

    def own(self, path, content=True, keep=True):
        """Put real folders and files in place of the links on the way to path.

        content: of path itself, too; keep: with what is in it.
        """
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # the number of an open file
        path = os.path.abspath(os.fsdecode(path))
        if not is_beneath(path, self.folder):
            self.check(os.path.realpath(path))
            return
        place = self.folder
        parts = pathlib.Path(path).relative_to(self.folder).parts
        for number, part in enumerate(parts, 1):
            place = os.path.join(place, part)
            if os.path.islink(place) and (number < len(parts) or content):
                target = os.path.realpath(place)
                if is_beneath(target, self.folder):  # the copy's own link
                    place = target
                else:
                    self.replace(place, target, keep or number < len(parts))

    def replace(self, link, target, keep):
        new = tempfile.mktemp(dir=self.folder)
        if os.path.isdir(target):
            os.mkdir(new)
            for entry in os.scandir(target):
                os.symlink(entry.path, f"{new}/{entry.name}")
        elif os.path.exists(target) and keep:
            shutil.copyfile(target, new)
        with open(f"{self.folder}/lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another rank may do the same
            if os.path.islink(link):
                os.unlink(link)
                if os.path.exists(new):
                    os.rename(new, link)

    def check(self, path):
        """Raise an error unless path may be written."""
        if any(is_beneath(path, place) for place in self.free):
            return
        if self.begin_of_download and (not os.path.exists(path) or
                                       os.path.getmtime(path) >= self.begin_of_download):
            return
        raise PermissionError(errno.EACCES, FORBIDDEN, path)

    def download(self, module, here):
        """Let the copy download its data into the user's folder, where it may change nothing."""
        if hasattr(module, "prepare_data"):
            os.chdir(here)
            self.begin_of_download = time.time()
            module.prepare_data(module.parse_args())
            self.begin_of_download = None

    def forbid_the_rest(self):
        """Let the kernel refuse what Python does not see: Landlock, of Linux 5.19 and later."""
        system = ctypes.CDLL(None)
        version = system.syscall(444, None, 0, 1) if sys.platform == "linux" else 0
        if version < 2:
            return
        writes = 0x3ff2 | (version > 2) << 14  # all but read and execute; the last one: truncate
        rules = system.syscall(444, struct.pack("Q", writes), 8, 0)
        for place in filter(os.path.isdir, self.free):
            rule = struct.pack("=Qi", writes, os.open(place, os.O_PATH))
            system.syscall(445, rules, 1, rule, 0)
        system.prctl(38, 1, 0, 0, 0)
        system.syscall(446, rules, 0)


# ---- Samples ----
def are_tensors(data):
    """Return whether data is a tuple of tensors or arrays, whose rows are samples."""
    rows = isinstance(data, (tuple, list)) and [getattr(part, "shape", ()) for part in data]
    return bool(rows) and all(rows)


def size(data):
    return min(map(len, data)) if are_tensors(data) else len(data)


def few(data, count):
    """Return so many samples of a data set, from all of it, and some twice if it has fewer."""
    if not size(data) or are_tensors(data) and len(set(map(len, data))) > 1:
        return data  # the copy refuses it
    indices = [index * size(data) // count for index in range(count)]
    return tuple(part[indices] for part in data) if are_tensors(data) else Few(data, indices)


class Few:
    """Some samples of a data set, with its attributes: of lists of samples, those of the few."""

    def __init__(self, data, indices):
        vars(self).update(all_samples=data, indices=indices)

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        return self.all_samples[self.indices[index]]

    def __getattr__(self, name):
        if "all_samples" not in vars(self):  # it is being unpickled
            raise AttributeError(name)
        value = getattr(self.all_samples, name)
        if are_tensors(value) and size(value) == len(self.all_samples):
            return tuple(part[self.indices] for part in value)
        if not hasattr(value, "__getitem__") or len(value) != len(self.all_samples):
            return value
        return value[self.indices] if hasattr(value, "shape") else [value[i] for i in self.indices]


def read(data, count):
    """Return digests of about so many samples, from all of a data set."""
    found = []
    for index in range(0, size(data), max(1, size(data) // max(1, count))):
        random.seed(0)
        torch.default_generator.manual_seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        sample = [part[index] for part in data] if are_tensors(data) else data[index]
        found.append(digest(sample))
    return found


# ---- Numbers ----
def digest(value):
    """Return a text that equal samples, or equal tensors, share."""
    if isinstance(value, torch.Tensor):
        value = value.detach().to_dense().contiguous()
        content = ctypes.string_at(value.data_ptr(), value.numel() * value.element_size())
    elif hasattr(value, "tobytes"):  # arrays of numpy, images
        content = value.tobytes()
    elif isinstance(value, dict):
        content = digest([*value.items()]).encode()
    elif isinstance(value, (list, tuple)):
        content = "".join(map(digest, value)).encode()
    else:
        content = repr(value).encode() if isinstance(value, (str, int, float)) else b""
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def numbers(state, place=""):
    """Return digests of the tensors and numbers of a state dict, by their places in it."""
    if isinstance(state, (list, tuple)):
        state = dict(enumerate(state))
    if isinstance(state, dict):
        return {inner: value for key, part in state.items()
                for inner, value in numbers(part, f"{place}.{key}").items()}
    return {place: digest(state)}


def weights(parts):
    """Return the weights of all models in saved, by name."""
    return {f"{part_name}.{name}": weight for part_name, part in parts.items()
            if isinstance(part, torch.nn.Module) for name, weight in part.named_parameters()}


def floats(result):
    """Return the numbers of a result: the loss is the first."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        return [number for part in result for number in floats(part)]
    if isinstance(result, torch.Tensor):
        result = result.detach().double().sum()
    return [float(result)] if hasattr(result, "__float__") else []


def random_numbers():
    return digest(torch.get_rng_state()), random.getstate()


# ---- Start these processes ----
def run(folder, path, flags, jobs, nproc=1, wait=1800):
    """Do jobs in nproc processes. Return what each rank has seen in each, and how others ended."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    others = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "SLURM_", "PMI",
              "OMPI_", "PET_", "TORCHELASTIC_", "GLOO_", "PYTHONHASHSEED")  # of another job
    env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    env.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", WANDB_MODE="disabled",
               PYTHONDONTWRITEBYTECODE="1", TMPDIR=folder,
               TORCH_DISTRIBUTED_DEBUG="INFO")  # names the parameters that have no gradient
    if nproc > 1:
        env.update(WORLD_SIZE=str(nproc), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    here = os.getcwd()
    for mirror in {f"{folder}/{job.checkpoint}" for job in jobs}:
        if not os.path.exists(mirror):
            make_links(mirror, here)
    processes = []
    try:
        for rank in range(nproc):
            env.update(RANK=str(rank), LOCAL_RANK=str(rank))
            processes.append(start([path, here, folder, rank, wait, jobs, flags], env))
        statuses = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and its loader processes
    seen, problems = {}, {}
    for job in jobs:
        names = [f"{folder}/{job.name}-{rank}" for rank in range(nproc)]
        files = [pathlib.Path(f"{name}.json") for name in names]
        if all(file.exists() for file in files):
            seen[job.name] = [json.loads(file.read_text()) for file in files]
            continue
        ends = [how_it_ended(path, file.exists() or status, f"{name}.log")
                for name, file, status in zip(names, files, statuses)]
        problems[job.name] = "".join(f"\n      rank {rank} {end}" for rank, end in enumerate(ends))
    return seen, problems


def start(arguments, env):
    command = [sys.executable, os.path.realpath(__file__), "--process", json.dumps(arguments)]
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)


def how_it_ended(path, status, log):
    """Return how a process has ended, and in which lines of the copy. status: True if it is well"""
    text = pathlib.Path(log).read_text(errors="replace") if os.path.exists(log) else ""
    if status is True:
        return "has ended"
    waits = "Timeout (" in text  # faulthandler's word
    stack = text.rpartition("(most recent call")[2]
    if status < 0 and not waits:
        return f"was killed by {signal.Signals(-status).name}: is there too little memory?"
    errors = re.findall(r"^(?:[\w.]+Error|SystemExit|error|Parameters which).*", stack, re.MULTILINE)
    frames = re.findall(rf'File ".*{re.escape(path)}", line (\d+)(?:,? in (\w+))?', stack)
    lines = ["waits in" if waits else "ends with an error in"]
    for number, name in [frame for frame in frames if frame[1]] or frames[-1:]:
        place = f"line {number}, {name}()" if name else f"line {number}"
        lines.append(f"{place}: {linecache.getline(path, int(number)).strip()}")
    lines += [] if waits else errors[-2:] or stack.splitlines()[-3:]
    return "\n        ".join(line[:400] for line in lines)


# ---- Compare ----
failed = []
LATER = {"again": "a finished run that is started again", "test": "an evaluation",
         "whole test": "an evaluation of a single batch", "whole step": "a step of a single part"}


def check(promise, good, otherwise):
    """Print whether a promise holds. Return it."""
    print(f"ok    {promise}" if good else f"FAIL  {promise}: {otherwise}", flush=True)
    failed.extend([] if good else [promise])
    return good


def skip(promise, reason):
    print(f"----  not checked: {promise}: {reason}", flush=True)


def main():
    """Return the exit status."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    path, flags = os.path.realpath(sys.argv[1]), sys.argv[2:]
    if not os.path.isfile(path):
        skip(sys.argv[1], "there is no such file")
        return 2
    text = pathlib.Path(path).read_text(errors="replace")
    missing = [name for name in ("parse_args", "load_data", "train", "save_checkpoint")
               if f"def {name}(" not in text]
    if missing:
        skip(sys.argv[1], f"it has no function {missing[0]}: it is no copy of cifar10_ddp, "
             "fashionmnist_ddp or cpu_ddp")
        return 2
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return compare(os.path.realpath(folder), path, flags)
    except KeyboardInterrupt:
        skip("the rest", "interrupted")
        return 2


def compare(folder, path, flags):
    """Train, print what holds and what differs, and return the exit status."""
    print(f"Checking {sys.argv[1]} on CPUs, with {TRAINING_SAMPLES} training samples and "
          f"{TEST_SAMPLES} test samples of its data:\n2 epochs of 3 steps of 16 samples, in parts "
          "of 4, on one process.", flush=True)
    begin = time.monotonic()
    seen, problems = run(folder, path, flags, [Job("one", "one"),
                                               Job("stopped", "stopped", end="signal")])
    if "one" not in seen:
        skip("anything", f"one process does not train to the end on a CPU:{problems['one']}")
        return 2
    if not seen["one"][0]["steps"]:
        skip("anything", "train() has made no step of an optimizer")
        return 2
    seconds = time.monotonic() - begin
    print(f"Now on two processes, then stopped and resumed: about {seconds:.0f} s more.", flush=True)
    two, problems_of_two = run(folder, path, flags, [Job("two", "two")], 2, WAIT + seconds)
    problems.update(problems_of_two)
    if "SyncBatchNorm" in problems.get("two", ""):
        skip("anything", f"SyncBatchNorm needs GPUs: check with BatchNorm{problems['two']}")
        return 2
    more, problems_of_more = run(folder, path, flags, [
        Job("again", "one"), Job("test", "two" if two else "one"),
        Job("whole test", "two" if two else "one", batch_size=2 * TEST_SAMPLES),
        Job("whole step", "nothing", batch_size=16, end="first step"),
        Job("in parts", "nothing", end="first step in eval()"),
        Job("at once", "nothing", batch_size=16, end="first step in eval()"),
        Job("resumed", "stopped")])
    problems.update(problems_of_more)
    seen.update(**two, **more)

    if not check_data(seen):
        skip("the rest", "it would differ, too")
        return 1
    check("two processes train to the end", bool(two), "they do not. All ranks make the same "
          f"calls: is one below `if rank == 0`?{problems.get('two')}")
    of_a_batch = check_evaluation(seen, bool(two) and check_weights(*two["two"]))
    if not of_a_batch:
        note_parts(seen)
    check_training(seen, of_a_batch)
    check_resume(seen, problems, os.path.exists(f"{folder}/stopped.pt"))
    broken = [name for name in LATER if name in problems]
    if broken:
        skip("the rest", f"{LATER[broken[0]]} ends with an error:{problems[broken[0]]}")
    return 1 if failed else 2 if broken else 0


def check_data(seen):
    one = seen["one"][0]
    promise = "no test sample is a training sample"
    if len(one["many"]) < 2 or not all(one["many"]):
        skip(promise, "there are not two sets")
    else:
        training, test = one["many"][:2]
        times = collections.Counter(training)
        in_both = sum(sample in times for sample in test)
        share = in_both / len(test) * one["sizes"][0] / len(training)
        by_chance = 1 - [*times.values()].count(1) / len(training)  # in a table of few values
        leak = in_both > 2 and share > 0.5 + by_chance
        check(promise, not leak, f"{in_both} of {len(test)} test samples are among {len(training)} "
              "training samples. Draw or split both sets at once")
        if in_both and not leak and by_chance < 0.5:
            print(f"note  {in_both} of {len(test)} test samples are training samples, too")
    of_all = [(rank["sizes"], rank["samples"])
              for name in ("one", "two", "resumed") for rank in seen.get(name, [])]
    return check("all processes, and all starts, load the same data",
                 all(samples == of_all[0] for samples in of_all), "sort what comes from a set or a "
                 "folder, seed what is random (numpy, pandas, scikit-learn), and load all samples "
                 "on all ranks")


def check_weights(first, second):
    different = [name for name, value in first["weights"].items()
                 if second["weights"].get(name) != value]
    return check("all processes have the same weights at the end", not different,
                 f"not {some(different)}: call ddp_model(...), and in the loss model(...), no "
                 "method of it; each model needs its DDP; set requires_grad in build_model")


def check_evaluation(seen, compare_two):
    """Return whether the test loss is one of a batch, as of pairs of samples, not of samples."""
    one = seen["one"][0]
    promise = "the same weights are tested alike on one and two processes"
    results = {name: ranks[0]["evaluations"][-1] for name, ranks in seen.items()
               if any(ranks[0]["evaluations"])}
    if not {"one", "again", "test", "whole test"} <= {*results}:
        if {"again", "test", "whole test"} <= {*seen}:  # else, their error is shown
            skip(promise, "evaluate() is not called in the first two epochs")
        return False
    changes = ", and it changes the model" if one["changes"] else ""
    alike = check("an evaluation depends on the saved weights alone",
                  results["one"] == results["again"] and not changes,
                  f"{show(results['one'])} at the end of a run, {show(results['again'])} when it "
                  f"is started again{changes}: call model.eval(); call torch.manual_seed(0) before "
                  "evaluate() if it draws random numbers; put what is tested (an average) into "
                  "saved")
    if one["draws"] or not alike:
        skip(promise, "the evaluation draws random numbers, or depends on more than the weights")
        return False
    test, whole = results["test"], results["whole test"]
    ratios = [part / all_at_once if all_at_once else 1.0 for part, all_at_once in zip(test, whole)]
    if any(4.5 < ratio < 9 for ratio in ratios):  # 6 batches, or one
        check(promise, False, f"{show(test)} in batches of 4, {show(whole)} in a single one: "
              "return sums over samples, of loss and metric, or multiply means by len(labels)")
    elif not math.isclose(ratios[0], 1, rel_tol=0.02):
        print(f"note  the test loss depends on the batch size, as one over pairs of samples does: "
              f"{show(test)} in batches of 4, {show(whole)} in a single one")
        return True
    elif compare_two:
        pairs = [*zip(results["two"], test)]
        if "--bf16" in sys.argv:
            pairs = pairs[:1]  # rounding decides which of two scores is the higher
        elif not all(math.isclose(ratio, 1, rel_tol=0.02) for ratio in ratios):
            pairs = pairs[:1]
            print(f"note  the test metric depends on the batch size, as F1 or a correlation does: "
                  f"{show(test)} in batches of 4, {show(whole)} in a single one. Compute it from "
                  "all scores")
        check(promise, all(math.isclose(*pair, rel_tol=2e-3) for pair in pairs),
              f"{show(results['two'])} on two, {show(test)} on one: each rank tests its share, and "
              "the sums of all ranks are added up")
    return False


def note_parts(seen):
    """Print whether the loss of a sample depends on the others of its part of a batch."""
    steps = [step for name in ("in parts", "at once") if name in seen
             for step in seen[name][0]["steps"] if step["losses"]]
    if len(steps) < 2 or seen["in parts"][0]["draws"]:
        return
    parts, whole = steps
    norms = parts["norms"]
    if len(parts["losses"]) != 4 * len(whole["losses"]) or not any(norms.values()):
        return
    least = 1e-4 * math.hypot(*norms.values()) / math.sqrt(len(norms))  # or rounding
    differences = [abs(value - whole["norms"].get(name, 0)) / max(value, least)
                   for name, value in norms.items()]
    difference = statistics.median(differences)  # single ones differ by rounding before a ReLU
    if difference > 1e-3:
        print(f"note  the gradients depend on how a batch is divided (by {100 * difference:.2g} % "
              "here), as of a mean over all tokens, a Dice loss, or weights by the counts of a "
              "batch: so they depend on the number of processes")


def check_training(seen, of_a_batch):
    one = seen["one"][0]
    promise = "the loss and the metric in training are sums over samples"
    parts, whole = ([losses for step in seen[name][0]["steps"][:1] for losses in step["losses"]]
                    if name in seen else [] for name in ("one", "whole step"))
    if not any(whole) or len(parts) != 4 * len(whole):
        if "whole step" in seen:
            skip(promise, "the loss is not called once for each part of a batch")
    else:
        sums, whole_sums = ([sum(values) for values in zip(*losses)] for losses in (parts, whole))
        means = 2.8 < sums[0] / (whole_sums[0] or math.inf) < 5.6 or any(
            math.isclose(part, 4 * whole, rel_tol=1e-3) and whole % 1  # a count is a whole number
            for part, whole in zip(sums[1:], whole_sums[1:]))
        check(promise, not means, f"{show(sums)} of 16 samples in four parts, {show(whole_sums)} "
              "in a single one: multiply means by len(labels)")
    if "two" not in seen:
        return

    first, second = seen["two"]
    batches = [{*step["batches"]} for step in one["steps"]]
    of_both = [{*step["batches"], *other["batches"]}  # LBFGS repeats some
               for step, other in zip(first["steps"], second["steps"])]
    rates = [(rate, other) for step, step_of_two in zip(one["steps"], first["steps"])
             for rate, other in zip(step["rates"], step_of_two["rates"])]
    check("one and two processes train on the same samples, at the same rates",
          batches == of_both and all(math.isclose(*pair, rel_tol=1e-3) for pair in rates),
          "their order depends on seed and epoch alone; random transforms use torch or random, and "
          "numpy with a seed for each sample; rates and other options of the optimizer are those "
          "of the global batch, on any number of processes")
    promise = "the first gradients are the same on one and two processes"
    norms, others = ([step["norms"] for step in seen[name][0]["steps"]] for name in ("one", "two"))
    if of_a_batch or not any(norms[:1]):
        skip(promise, "the loss is one of a batch, or the optimizer computes them itself")
    else:
        least = 1e-4 * math.hypot(*norms[0].values()) / math.sqrt(len(norms[0]))  # or rounding
        different = [name for name, value in norms[0].items()
                     if abs(value - others[0].get(name, math.inf)) > 1e-3 * max(value, least)]
        check(promise, not different, f"not {some(different)}: call ddp_model(...), and in the "
              "loss model(...), no method of it; keep loss * (world_size / global_batch); use "
              "random numbers of torch, in build_model, too; keep no state in globals; clip the "
              "gradients of all parts")


def check_resume(seen, problems, has_saved):
    promise = "a stopped and resumed run ends with the same numbers"
    one = seen["one"][0]
    if not one["end"]:
        skip(promise, "restore(checkpoint, settings, saved) is not called")
        return
    if len(one["steps"]) < 3:
        skip(promise, f"two epochs have {len(one['steps'])} steps only")
        return
    stopped = "stopped" in seen and seen["stopped"][0]["stopped"] and has_saved
    if not check("SIGTERM stops a run, which saves", stopped, f"it does not{problems.get('stopped', '')}"):
        return
    if "resumed" not in seen:
        check(promise, False, f"it does not end{problems['resumed']}")
        return
    resumed = seen["resumed"][0]
    before, after = ({**job["weights"], **job["end"]} for job in (one, resumed))
    different = [place for place in before if before[place] != after.get(place)]
    steps = zip(one["steps"][len(one["steps"]) - len(resumed["steps"]):], resumed["steps"])
    first = [f"{name} of step {number} after the resume"
             for number, (before, after) in enumerate(steps, 1)
             for key, name in {"rates": "rate", "losses": "loss", "norms": "gradient"}.items()
             if before[key] != after[key]][:1]
    check(promise, not different, f"not {some(first + different)}. Put what must survive a stop "
          "into saved, before restore(): models, optimizers, schedulers, averages, counters; a "
          "queue is a buffer of a model, and a hidden state begins with zeros. Use random numbers "
          "of torch. Call optimizer.zero_grad() before each step; clone() a gradient that you keep")


def show(results):
    return ", ".join(f"{result:.4g}" for result in results)


def some(names):
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        process(*json.loads(sys.argv[2]))
    sys.exit(main())
