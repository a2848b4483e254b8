# SPDX-License-Identifier: MIT-0
"""Check an edited copy of a DDP script of this collection, on CPUs, in about half a minute.

    python check_copy.py my.py [flags of my.py]

The check trains my.py for two epochs on a few of its own samples: on one process, on two, and
stopped and resumed. It compares data, gradients, weights and test results, and says what differs.
Start it in the folder in which my.py finds its data. There, my.py works in a temporary folder of
links to your files, so that none of them changes.

Exit status: 0 if all is ok, 1 after a FAIL, 2 if my.py cannot be checked.
"""
import collections.abc
import contextlib
import copy
import ctypes
import errno
import faulthandler
import fcntl
import functools
import gc
import glob
import hashlib
import importlib.util
import inspect
import itertools
import json
import linecache
import math
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback

TRAINING_SAMPLES, TEST_SAMPLES = 54, 23  # 3 steps of 16 samples in an epoch; 6 are left out
SETTINGS = {"epochs": 2, "global_batch": 16, "workers": 1, "nproc": None, "log_every": 1e9,
            "save_every": 1e9, "timeout": 1800}
WAIT = 60  # seconds: a process that computes nothing for longer waits for another
FORBIDDEN = "the check forbids to change an absolute path; use a relative path"
# One call of the copy's train(). checkpoint is the name of the job that writes the file
Job = collections.namedtuple("Job", "name checkpoint batch_size end",
                             defaults=(None, "last step"))


# ---- In each process that trains ----
def process(path, here, folder, rank, wait, jobs, flags, ports):
    """Call the copy's train() for each job, and write what was seen in it."""
    global torch
    import torch  # not in the process that compares: it takes two seconds
    own_folder = os.path.dirname(os.path.realpath(__file__))
    places = [place for place in sys.path if place != own_folder]
    sys.argv = [path, *flags]
    if sys.platform == "linux":
        torch.multiprocessing.set_start_method("fork", force=True)
    tempfile.tempdir = folder
    files = Files(folder)
    begin = time.monotonic()
    steps = 0  # of the job before
    status = 0
    for number, job in enumerate(map(Job._make, jobs)):
        sys.stdout = sys.stderr = open(f"{folder}/{job.name}-{rank}.log", "w", buffering=1)
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(1, 2)
        os.environ["MASTER_PORT"] = str(ports[number])
        mirror = f"{folder}/{job.checkpoint}"
        script = mirror + path if os.path.exists(mirror + path) else path
        try:
            os.chdir(mirror + here)
            if script != path:
                files.own(script)  # then a file beside __file__ is in the temporary folder, too
            sys.path[:] = [os.path.dirname(script), *places]
            module = load(script)  # anew: no job finds the globals of the one before
            gc.collect()  # now: a loader process that deletes an old group waits for its threads
            if job.name == "one":
                files.download(module, here)
                for other in jobs:
                    make_links(f"{folder}/{other[1]}", here)
                os.chdir(mirror + here)
            if number == 0:
                files.forbid_the_rest()
            files.written.clear()
            seen = train(module, folder, wait, job, steps)
            seen["written"] = [os.path.relpath(place, mirror + here) for place in files.written]
            steps = len(seen["steps"])
            seen["seconds"] = time.monotonic() - begin
            pathlib.Path(f"{folder}/{job.name}-{rank}.json").write_text(json.dumps(seen))
        except BaseException:
            traceback.print_exc()
            status = 1
            if job.name in ("one", "two"):
                break  # the others would end with the same error
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


class Enough(BaseException):
    """Ends a training before its last step."""


def train(module, folder, wait, job, steps):
    """Call the copy's train(). Return what was seen in it, as numbers and text."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    seen = {"steps": [], "evaluations": [], "tested": [], "stopped": False, "draws": [],
            "changes": False}
    functions = dict(vars(module))
    code_of_train = inspect.unwrap(module.train).__code__
    calls = []  # of the loss, of which the next step is made: results, batches, rows, modes
    sets, items, trained, optimizers, evaluating, first_buffers = [], {}, {}, [], [], []
    model_of_loss = []

    def sign_of_life():
        """After so many seconds without another one, print where each thread is, and end."""
        faulthandler.dump_traceback_later(wait, exit=True)

    def load_few(*arguments, **options):
        return cut(functions["load_data"](*arguments, **options), sets)

    def begin_with_the_first_buffers(model):
        """Undo what the parts before have done: on two processes, each computes half of them."""
        buffers = [*model.buffers()]
        if not calls:
            first_buffers[:] = [buffer.clone() for buffer in buffers]
        for buffer, first in zip(buffers, first_buffers):
            if digest(buffer) != digest(first):  # of BatchNorm, a queue, spectral_norm
                buffer.copy_(first)

    def see_loss(*arguments, **options):
        sign_of_life()
        model, before, batch = at_the_model(arguments)
        if not seen["steps"] and not evaluating and job.name != "resumed":
            begin_with_the_first_buffers(model)
        if job.end == "loss":
            loss = functools.partial(functions[loss_name], *before, model)
            seen["loss"] = losses_of_parts(loss, model, batch, options)
            raise Enough
        if job.end == "gradients in eval()":
            model.eval()
        random_before = random_numbers()
        result = functions[loss_name](*arguments, **options)
        if evaluating:
            seen["tested"][-1] += len(rows(batch))
            if random_numbers() != random_before:
                seen["draws"].append(digest(random_before))
        elif torch.is_grad_enabled():
            model_of_loss[:] = [model]
            data = [part for part in batch if not isinstance(part, torch.nn.Module)]  # a critic
            modes = [part.training for part in model.modules()]
            calls.append((loss_and_counts(result), digest(data), rows(data), digest(modes)))
        return result

    def see_evaluation(*arguments, **options):
        model = at_the_model(arguments)[0]
        tested = f"{folder}/tested.pt"
        if job.name == "one":
            torch.save(model.state_dict(), tested)
        elif job.end == "test":
            model.load_state_dict(torch.load(tested))
        before = digest([*model.buffers()])
        evaluating.append(True)
        seen["tested"].append(0)
        result = functions["evaluate"](*arguments, **options)
        evaluating.pop()
        seen["evaluations"].append(floats(result))
        seen["changes"] |= digest([*model.buffers()]) != before
        if job.end == "test":
            raise Enough
        return result

    def before_step(optimizer, *_):
        sign_of_life()
        if job.end == "gradients in eval()" and optimizer in optimizers:
            raise Enough
        optimizers.append(optimizer)
        items.update(items_of(code_of_train))
        names = {id(weight): name for name, weight in reversed(weights(items).items())}
        own = {names.get(id(weight), f"weight {number} (in no model of train)"): weight
               for group in optimizer.param_groups for number, weight in enumerate(group["params"])}
        trained.update(own)
        norms = {name: weight.grad.detach().to_dense().double().norm().item()
                 for name, weight in own.items() if weight.grad is not None}
        rates = [number for group in optimizer.param_groups for name, value in sorted(group.items())
                 if name != "params" for number in floats(value)]  # and the other options
        results, parts, parts_rows, modes = zip(*calls) if calls else ((), (), (), ())
        seen["steps"].append({"losses": results, "rates": rates, "norms": norms, "parts": parts,
                              "modes": modes, "number": [len(rows) for rows in parts_rows],
                              "rows": [row for part in parts_rows for row in part]})
        calls.clear()
        # In the second epoch, or in the first if the copy stops at the end of an epoch only
        stop = min(steps * 2 // 3, steps - 2) if "restore" in functions else steps // 3
        if job.end == "signal" and len(seen["steps"]) == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    loss_name = "loss_of" if "loss_of" in functions else "loss_and_counts"
    seeing = {"load_data": load_few, loss_name: see_loss, "evaluate": see_evaluation}
    vars(module).update({name: see for name, see in seeing.items() if name in functions})
    module.CHECK_EVERY = 1
    args = module.parse_args()
    # A copy of a small script does not evaluate again what is finished: it begins anew
    new = job.end == "test" and "restore" not in functions
    checkpoint = f"new {job.name}" if new else job.checkpoint
    share = 4 if hasattr(args, "global_batch") else 16 // int(os.environ.get("WORLD_SIZE", 1))
    settings = {**SETTINGS, "batch_size": job.batch_size or share,
                "checkpoint": f"{folder}/{checkpoint}.pt",
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
    except SystemExit:
        if job.end != "signal":
            raise
        seen["stopped"] = True
    except Enough:
        if torch.distributed.get_world_size() > 1:  # as close_group() of the scripts does
            torch.distributed.barrier()
            time.sleep(0.5)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        hook.remove()
        faulthandler.cancel_dump_traceback_later()
    trained.update(weights(items))
    seen["weights"] = {name: digest(part) for name, part in trained.items() if part.requires_grad}
    seen["others"] = {f"{name}{place}": value for name, item in items.items()
                      if not isinstance(item, (torch.nn.Module, torch.optim.Optimizer))
                      for place, value in numbers(item.state_dict()).items()}
    stepped = {id(weight) for optimizer in optimizers for group in optimizer.param_groups
               for weight in group["params"]}
    seen["not in an optimizer"] = [
        name for model in model_of_loss for name, weight in model.named_parameters()
        if weight.requires_grad and id(weight) not in stepped]
    if job.end == "last step" and os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location="cpu", weights_only=False)
        seen["saved"] = {place[1:]: value for place, value in numbers(saved).items()}
    if job.name in ("one", "two", "resumed"):
        # Now: the loader's processes would share a file that is opened before they start
        seen["sizes"] = [size(data) for data in sets]
        seen["samples"] = [read(data, 20) for data in sets]
    if job.name == "one":
        seen["both"] = in_both(*sets[:2]) if len(sets) > 1 and all(map(size, sets[:2])) else None
    return seen


def at_the_model(arguments):
    """Return the model among arguments, those before it, and those behind it: the batch."""
    for number, value in enumerate(arguments):
        if isinstance(value, torch.nn.Module):
            return value, arguments[:number], arguments[number + 1:]
    raise TypeError("the check expects a model among the arguments of the loss and of evaluate()")


def items_of(code):
    """Return what train() saves, and its models, by name."""
    frame = sys._getframe()
    while frame.f_back and frame.f_code is not code:
        frame = frame.f_back
    local = frame.f_locals
    saved = local.get("saved") if isinstance(local.get("saved"), dict) else {}
    items = {name: value for name, value in saved.items() if hasattr(value, "state_dict")}
    for name, value in local.items():
        wraps = isinstance(value, torch.nn.parallel.DistributedDataParallel)
        known = any(value is item for item in items.values())
        if isinstance(value, torch.nn.Module) and not wraps and not known:
            items[name] = value
    return items


def losses_of_parts(loss, model, batch, options):
    """Return what shows whether the loss is a mean, in and out of evaluation mode.

    Loss and counts of 10 samples, of 3 and the other 7; of 4 and these four times, for each 4.
    """
    count = len(rows(batch))
    if count < 10:
        return None
    whole = bool(tensors_of(batch))

    def loss_of(first, last, times=1):
        own = {name: some_rows(value, first, last, times, True)
               if is_tensor(value) and len(value) == count else value
               for name, value in options.items()}
        return loss(*(some_rows(value, first, last, times, whole) for value in batch), **own)

    of_parts = (0, 10), (0, 3), (3, 10)
    found = {"rounding": torch.is_autocast_enabled("cpu") or any(
        weight.dtype in (torch.bfloat16, torch.float16) for weight in model.parameters())}
    for training in (False, True):
        model.train(training)
        before = random_numbers()
        buffers = digest([*model.buffers()])
        with torch.set_grad_enabled(training):
            found[f"training {training}"] = [
                [loss_and_counts(loss_of(*part)) for part in of_parts],
                [[loss_and_counts(loss_of(first, first + 4, times)) for times in (1, 4)]
                 for first in range(0, count - 3, 4)]]
        found[f"draws {training}"] = random_numbers() != before
        found[f"changes {training}"] = digest([*model.buffers()]) != buffers  # BatchNorm
    model.eval()
    if not found["draws False"]:
        with contextlib.suppress(Exception):  # in evaluation mode, a loss may have no gradient
            ten, three, seven = (gradient(loss_of(*part), model) for part in of_parts)
            size = (3 * three.norm() + 7 * seven.norm()).item()
            found["gradient"] = (10 * ten - 3 * three - 7 * seven).norm().item() / size
    return found


def gradient(result, model):
    """Return the gradient of a loss as one vector."""
    loss = result[0] if isinstance(result, (list, tuple)) else result
    used = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(loss, used, allow_unused=True, materialize_grads=True)
    return torch.cat([part.to_dense().flatten() for part in gradients])


def some_rows(values, first, last, times, whole):
    """Return a part of a batch for some samples of it, several times. whole: see tensors_of()."""
    if is_constant(values):
        return values
    if isinstance(values, collections.abc.Mapping):
        part = copy.copy(values)
        for name, value in values.items():
            part[name] = some_rows(value, first, last, times, whole)
        return part
    if whole and isinstance(values, (list, tuple)):
        parts = [some_rows(value, first, last, times, whole) for value in values]
        return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
    part = copy.deepcopy(values[first:last])
    return torch.cat([part] * times) if isinstance(part, torch.Tensor) else part * times


# ---- Files: a copy works in a temporary folder of links to the user's files ----
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events that change a folder, or what is in a file or folder: which arguments are paths
OF_FOLDERS = {"os.remove": (0,), "os.rmdir": (0,), "os.mkdir": (0,), "os.rename": (0, 1),
              "os.link": (1,), "os.symlink": (1,)}
OF_CONTENTS = {"os.truncate": (0,), "os.utime": (0,), "os.chmod": (0,), "os.chown": (0,),
               "os.link": (0,), "shutil.rmtree": (0,), "sqlite3.connect": (0,)}
OF_PROGRAMS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen")


def make_links(mirror, here):
    """Make a folder mirror + here, and the one above it, of links to the files of here."""
    os.makedirs(mirror + here, exist_ok=True)
    for place in (here, os.path.dirname(here)):
        with contextlib.suppress(PermissionError):
            for entry in os.scandir(place):
                link = os.path.join(mirror + place, entry.name)
                if not os.path.lexists(link):  # as the folder of here is, in the one above it
                    os.symlink(entry.path, link)


def is_beneath(path, folder):
    return f"{path}/".startswith(f"{folder}/")


class Files:
    """Sees what Python is going to write: puts it into the temporary folder, or forbids it."""

    def __init__(self, folder):
        self.folder = folder
        cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
        caches = [os.environ.get(name, cache) for name in ("TORCH_HOME", "HF_HOME")]
        caches = {os.path.realpath(cache) for cache in [cache, *caches]}
        self.free = [folder, "/dev", *(cache for cache in caches
                                       if not is_beneath(os.getcwd(), cache))]
        self.begin_of_download = None
        self.written = set()  # files that are written anew
        self.thread = threading.local()
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
        if getattr(self.thread, "changes_links", False):
            return
        path = os.path.abspath(os.fsdecode(path))
        if not keep and not path.endswith("lock"):
            self.written.add(path)
        if not is_beneath(path, self.folder):
            self.check(os.path.realpath(path))
            return
        self.thread.changes_links = True
        try:
            with open(f"{self.folder}/lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another rank may do the same
                self.replace_links(path, content, keep)
        finally:
            self.thread.changes_links = False

    def replace_links(self, path, content, keep):
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
        if os.path.isdir(target):
            os.unlink(link)
            os.mkdir(link)
            for entry in os.scandir(target):
                os.symlink(entry.path, f"{link}/{entry.name}")
        elif os.path.exists(target) and keep:
            new = tempfile.mktemp(dir=self.folder)
            shutil.copyfile(target, new)
            os.replace(new, link)  # at once: another rank may read it
        else:
            os.unlink(link)

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
def is_tensor(value):
    return isinstance(value, torch.Tensor) and value.ndim or "numpy.ndarray" in str(type(value))


def are_tensors(data):
    """Return whether data is a tuple of tensors or arrays, whose rows are samples."""
    return (isinstance(data, (tuple, list)) and len(data) > 0 and all(map(is_tensor, data))
            and len({len(part) for part in data}) == 1)


def is_data(value):
    """Return whether value is a data set, and no vocabulary, list of names, or setting."""
    if are_tensors(value) or isinstance(value, torch.utils.data.Dataset):
        return hasattr(value, "__len__")
    if isinstance(value, (tuple, list)):
        settings = any(isinstance(part, (str, int, float, torch.Tensor)) for part in value)
        return len(value) > 2 and not settings and not any(map(is_data, value))
    if isinstance(value, (str, bytes, dict, torch.Tensor, torch.nn.Module)):
        return False
    try:
        return len(value) > 0 and value[0] is not None
    except Exception:
        return False


def cut(loaded, sets):
    """Return what load_data() returned with few samples of each data set. Add the sets to sets."""
    if is_data(loaded):  # the training set alone
        groups = [loaded]
    elif isinstance(loaded, dict):
        return dict(zip(loaded, cut([*loaded.values()], sets)))
    elif not isinstance(loaded, (tuple, list)):
        return loaded
    elif all(map(is_tensor, loaded)):  # inputs, labels, test inputs, test labels
        groups = [tuple(group) for _, group in itertools.groupby(loaded, len)]
    else:
        groups = loaded
    shortened = []
    sets.clear()
    for group in groups:
        if is_data(group) and not (sets and are_tensors(group) and len(group) != len(groups[0])):
            sets.append(group)
            group = few(group, TEST_SAMPLES if len(sets) > 1 else TRAINING_SAMPLES)
        shortened.append(group)
    if groups is loaded:
        return shortened
    return shortened[0] if is_data(loaded) else [part for group in shortened for part in group]


def size(data):
    return len(data[0]) if are_tensors(data) else len(data)


def few(data, count):
    """Return so many samples of a data set, from all of it, and some twice if it has fewer."""
    if not size(data):
        return data
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
        if is_tensor(value) and len(value) == len(self.all_samples):
            return value[self.indices]
        if isinstance(value, list) and name != "classes" and len(value) == len(self.all_samples):
            return [value[index] for index in self.indices]
        return value


def sample(data, index):
    """Return a text that equal samples share, also if they are transformed at random."""
    random.seed(0)
    torch.default_generator.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    return digest([part[index] for part in data] if are_tensors(data) else data[index])


def read(data, count):
    """Return digests of about so many samples, from all of a data set."""
    return [sample(data, index) for index in range(0, size(data), max(1, size(data) // count))]


def in_both(training, test):
    """Return how many different samples are in both sets, as far as they are read in 6 seconds."""
    found = []
    for data, seconds in ((training, 4), (test, 2)):
        if type(data) is torch.utils.data.TensorDataset:
            data = data.tensors
        end = time.monotonic() + seconds * (5 if are_tensors(data) else 1)
        indices = random.Random(0).sample(range(size(data)), size(data))
        read_in_time = itertools.takewhile(lambda _: time.monotonic() < end, indices)
        found.append([sample(data, index) for index in read_in_time])
    times = collections.Counter(found[0])
    of_test = {*found[1]}
    return {"read": [*map(len, found)], "both": sum(value in times for value in of_test),
            "different": len(of_test), "once": [*times.values()].count(1)}


# ---- Numbers ----
def rows(batch):
    """Return digests of each sample of a batch, and of each of its parts. Of a graph: []."""
    parts = tensors_of(batch)
    if not parts:
        for part in itertools.filterfalse(is_constant, batch):
            parts += part.values() if isinstance(part, collections.abc.Mapping) else [part]
    try:
        [count] = {len(part) for part in parts}
        return [[digest([part[index] for part in parts]), *(digest(part[index]) for part in parts)]
                for index in range(count)]
    except (TypeError, KeyError, ValueError):
        return []


def is_constant(value):
    return value is None or isinstance(value, (int, float, str)) or (
        isinstance(value, torch.Tensor) and not value.ndim)


def tensors_of(batch):
    """Return the tensors of which a batch is made, each with a row for each sample, or []."""
    def tensors(value):
        if isinstance(value, collections.abc.Mapping):
            value = [*value.values()]
        if isinstance(value, (list, tuple)):
            return [tensor for part in value for tensor in tensors(part)]
        return [value]

    found = tensors([*itertools.filterfalse(is_constant, batch)])
    alike = found and all(map(is_tensor, found)) and len({len(tensor) for tensor in found}) == 1
    return found if alike else []


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
        try:
            content = pickle.dumps(value)
        except Exception:
            content = str(type(value)).encode()
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def numbers(state, place=""):
    """Return digests of the tensors and numbers of a state dict, by their places in it."""
    if isinstance(state, (list, tuple)):
        state = dict(enumerate(state))
    if isinstance(state, dict):
        return {inner: value for key, part in state.items()
                for inner, value in numbers(part, f"{place}.{key}").items()}
    return {} if isinstance(state, str) else {place: digest(state)}


def weights(items):
    """Return the weights of all models among items, by name."""
    return {f"{item_name}.{name}": weight for item_name, item in items.items()
            if isinstance(item, torch.nn.Module) for name, weight in item.named_parameters()}


def floats(result):
    """Return the numbers of a result."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        return [number for part in result for number in floats(part)]
    if is_tensor(result) or isinstance(result, torch.Tensor):
        result = torch.as_tensor(result).detach().double().sum()
    return [float(result)] if hasattr(result, "__float__") else []


def loss_and_counts(result):
    """Return the loss and the counts of a result: what follows them is no metric."""
    return floats(result[:2] if isinstance(result, (list, tuple)) else result)


def random_numbers():
    return digest(torch.get_rng_state()), random.getstate()


# ---- Start these processes ----
class Run:
    """Processes that train a copy, one for each rank. They import PyTorch before they get jobs."""

    def __init__(self, folder, path, flags, size):
        self.folder, self.path, self.flags, self.processes = folder, path, flags, []
        others = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "SLURM_", "PMI",
                  "OMPI_", "PET_", "TORCHELASTIC_", "GLOO_", "PYTHONHASHSEED")  # of another job
        env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        env.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", WANDB_MODE="disabled",
                   PYTHONDONTWRITEBYTECODE="1", TMPDIR=folder, MASTER_ADDR="127.0.0.1",
                   WORLD_SIZE=str(size), LOCAL_RANK="0",  # as on machines of one process each
                   TORCH_DISTRIBUTED_DEBUG="INFO")  # names the parameters that have no gradient
        for rank in range(size):
            self.processes.append(start({**env, "RANK": str(rank)}))

    def do(self, jobs, wait=1800):
        self.jobs = jobs
        # A port for each job: a rank could meet the group of the job before
        servers = [socket.create_server(("127.0.0.1", 0)) for _ in jobs]
        ports = [server.getsockname()[1] for server in servers]
        for server in servers:
            server.close()
        here = os.getcwd()
        for mirror in {f"{self.folder}/{job.checkpoint}" for job in jobs}:
            if not os.path.exists(mirror):
                make_links(mirror, here)
        for rank, process in enumerate(self.processes):
            arguments = [self.path, here, self.folder, rank, wait, jobs, self.flags, ports]
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(json.dumps(arguments).encode())

    def results(self):
        """Return what each rank has seen in each job, and how the other jobs ended."""
        statuses = [process.wait() for process in self.processes]
        seen, problems = {}, {}
        for job in self.jobs:
            names = [f"{self.folder}/{job.name}-{rank}" for rank in range(len(statuses))]
            files = [pathlib.Path(f"{name}.json") for name in names]
            if all(file.exists() for file in files):
                seen[job.name] = [json.loads(file.read_text()) for file in files]
                continue
            if not any(os.path.exists(f"{name}.log") for name in names):
                continue  # it has not begun, because the job before it has failed
            ends = [how_it_ended(self.path, file.exists() or status, f"{name}.log")
                    for name, file, status in zip(names, files, statuses)]
            problems[job.name] = "".join(f"\n      rank {rank} {end}"
                                         for rank, end in enumerate(ends))
        return seen, problems

    def end(self):
        for process in self.processes:
            process.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and its loader processes


def start(env):
    command = [sys.executable, os.path.realpath(__file__), "--process"]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, start_new_session=True)


def how_it_ended(path, status, log):
    """Return how a process has ended, and in which lines of the copy. status: True if it is well"""
    text = pathlib.Path(log).read_text(errors="replace") if os.path.exists(log) else ""
    if status is True:
        return "has ended"
    waits = "Timeout (" in text  # faulthandler's word
    stack = text.rpartition("(most recent call")[2]
    if "\nOriginal Traceback" in text:  # of a loader process, behind that of this process
        stack = re.split("^Traceback", text, flags=re.MULTILINE)[-1]
    if status < 0 and not waits:
        return f"was killed by {signal.Signals(-status).name}: is there too little memory?"
    errors = re.findall(r"^(?:[\w.]+Error|SystemExit|error|Parameters which).*", stack, re.M)
    frames = re.findall(rf'File ".*{re.escape(path)}", line (\d+)(?:,? in (\w+))?', stack)
    lines = ["waits in" if waits else "ends with an error in"]
    for number, name in [frame for frame in frames if frame[1]] or frames[-1:]:
        place = f"line {number}, {name}()" if name else f"line {number}"
        lines.append(f"{place}: {linecache.getline(path, int(number)).strip()}")
    if "in collate_tensor_fn" in stack:
        lines.append("samples of one batch have different shapes")
    lines += [] if waits else errors[-2:] or stack.splitlines()[-3:]
    return "\n        ".join(line[:400] for line in lines)


# ---- Compare ----
SAMPLES = ("Use random numbers of torch or random in transforms, and numpy with a seed for each "
           "sample. Change no sample in place: clone() it")
WHOLE_STEPS = ("If a step() takes several batches, let it end in their epoch, and save after it "
               "alone")
# What is compared in the first step after a resume, in this order, and the remedy
AFTER_A_RESUME = {
    "rates": ("rate", "Put the scheduler into saved, before the file of --checkpoint is loaded"),
    "modes": ("mode", "Call model.train() after an evaluation of your own"),
    "number": ("number of samples", WHOLE_STEPS),
    "rows": ("samples", f"{SAMPLES}. {WHOLE_STEPS}"),
    "losses": ("loss", "Put all models, and counters, into saved, before the file of --checkpoint "
               "is loaded, and load no other weights after it. Use random numbers of torch. Keep "
               "no state in attributes or globals: register a queue as a buffer of a model, and "
               "begin a hidden state with zeros"),
    "norms": ("gradient", "Call optimizer.zero_grad() before each step. clone() a gradient that "
              "you keep"),
}
said = []  # the first word of each line
notes = []
note = notes.append  # to be said last
LATER = {"again": "a finished run that is started again", "test": "an evaluation",
         "test on two": "an evaluation", "whole test": "an evaluation in a single batch"}


def say(word, text):
    said.append(word)
    print(f"{word:4}  {text}", flush=True)


def check(promise, good, otherwise):
    """Print whether a promise holds. Return it."""
    say("ok" if good else "FAIL", promise if good else f"{promise}: {otherwise}")
    return good


def skip(promise, reason):
    say("----", f"not checked: {promise}: {reason}")


def say_the_rest():
    """Print the notes, and the number of lines of each kind."""
    for text in notes:
        say("note", text)
    if said.count("FAIL") > 1:
        print("      Mend the first FAIL first. It may cause the others.")
    names = {"ok": "ok", "FAIL": "FAIL", "----": "not checked", "note": "noted"}
    if "ok" in said or "FAIL" in said:
        print(", ".join(f"{said.count(word)} {name}" for word, name in names.items()
                        if word in said))


def main():
    """Return the exit status."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        print(__doc__)
        return 0 if sys.argv[1:] else 2
    path, flags = os.path.realpath(sys.argv[1]), sys.argv[2:]
    if not os.path.isfile(path):
        skip(sys.argv[1], "there is no such file")
        return 2
    text = pathlib.Path(path).read_text(errors="replace")
    missing = [name for name in ("parse_args", "load_data", "train")
               if not re.search(rf"\b{name}\b", text)]
    if missing:
        skip(sys.argv[1], f"it has no function {missing[0]}, so it is no copy of a DDP script of "
             "this collection")
        return 2
    if re.search(r"def (loss_and_correct\(|loss_of\(model\b)", text):
        skip(sys.argv[1], "it is a copy of an older version: use the check_copy.py of that version")
        return 2
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            status = compare(os.path.realpath(folder), path, flags)
            say_the_rest()
            return status
    except KeyboardInterrupt:
        skip("the rest", "interrupted")
        return 2


def train_copies(folder, path, flags):
    """Return what was seen in each job, and how the others ended. No job: it cannot be checked."""
    print(f"Training {sys.argv[1]} on CPUs, at first on one process: two epochs of 3 steps of 16 "
          f"samples,\nof {TRAINING_SAMPLES} training samples, and of {TEST_SAMPLES} test samples "
          "if there are any.", flush=True)
    with contextlib.ExitStack() as ends:
        runs = []
        for size in (1, 2, 1):
            runs.append(Run(folder, path, flags, size))
            ends.callback(runs[-1].end)
        first, two, one = runs
        first.do([Job("one", "one"), Job("stopped", "stopped", end="signal")])
        seen, problems = first.results()
        if FORBIDDEN in problems.get("one", ""):
            skip("anything", f"it changes a file at an absolute path{problems['one']}")
            return {}, {}
        if "one" not in seen:
            skip("anything", f"one process does not train to the end on a CPU, with "
                 f"{TRAINING_SAMPLES} samples:{problems['one']}")
            return {}, {}
        if not seen["one"][0]["steps"]:
            skip("anything", "train() has made no step of an optimizer")
            return {}, {}
        seconds = sum(ranks[0]["seconds"] for ranks in seen.values())  # some 3 trainings
        print(f"Now on two processes, and stopped and resumed: about {seconds:.0f} s more (if the "
              f"processes wait for each other, {WAIT + seconds:.0f} s).", flush=True)
        jobs_of_two = [Job("two", "two")]
        jobs_of_one = [Job("resumed", "stopped"), Job("again", "one"),
                       Job("loss", "new", 16, "loss")]
        if len(seen["one"][0]["steps"][0]["parts"]) == 1:  # dropout and BatchNorm differ on two
            jobs_of_two += [Job("two in eval()", "new on two", end="gradients in eval()")]
            jobs_of_one += [Job("one in eval()", "new", end="gradients in eval()")]
        if os.path.exists(f"{folder}/tested.pt"):
            jobs_of_two += [Job("test on two", "two", 4, "test")]
            jobs_of_one += [Job("test", "one", 4, "test"),
                            Job("whole test", "one", 2 * TEST_SAMPLES, "test")]
        two.do(jobs_of_two, WAIT + seconds)
        one.do(jobs_of_one)
        for run in (two, one):
            others, other_problems = run.results()
            seen.update(others)
            problems.update(other_problems)
    return seen, problems


def compare(folder, path, flags):
    """Train, print what holds and what differs, and return the exit status."""
    seen, problems = train_copies(folder, path, flags)
    end = problems.get("two", "")
    if "SyncBatchNorm" in end:
        skip("anything", f"SyncBatchNorm needs GPUs: check with BatchNorm{end}")
        return 2
    if not seen:
        return 2
    if not check_data(seen):
        skip("the rest", "it would differ, too")
        return 1
    waits = re.search("waits in|has ended|[Cc]onnection", end)
    if check("two processes train to the end", "two" in seen, ("make the same calls of "
             "torch.distributed on all ranks, in the same order. Move them out of `if rank == 0`, "
             "and let all ranks end a loop together:"
             if waits else "they end with an error:") + end):
        check_ranks(*seen["two"])
        both = {*seen["two"][0]["written"]} & {*seen["two"][1]["written"]}
        if both:
            note(f"both processes write {some(sorted(both))}: write it below `if rank == 0`")
    in_tests, in_training = check_loss(seen, problems)
    check_evaluation(seen, in_tests)
    if "two" in seen:
        check_two_processes(seen, problems, in_training)
    check_resume(seen, problems, glob.glob(f"{folder}/stopped.pt*"))
    names = seen["one"][0]["not in an optimizer"]
    if names:
        note(f"these weights are in no optimizer: {some(names)}. If this is intended, set "
             "requires_grad to False in build_model")
    broken = [name for name in LATER if name in problems]
    if broken:
        skip("the rest", f"{LATER[broken[0]]} ends with an error:{problems[broken[0]]}")
    return 1 if "FAIL" in said else 2 if broken else 0


def check_data(seen):
    one = seen["one"][0]
    promise = "no test sample is a training sample"
    found = one["both"]
    if not found:
        skip(promise, "load_data() does not return two sets with samples")
    else:
        (samples, tests), (read_samples, read_tests) = one["sizes"][:2], found["read"]
        both, different = found["both"], found["different"]
        by_chance = 1 - found["once"] / read_samples  # in a table of few values
        leak = both > 2 and both / different * samples / read_samples > 0.5 + by_chance
        counts = f"{both} of {different} different test samples are training samples"
        if read_samples < samples or read_tests < tests:
            promise += f" ({read_tests} of {tests} and {read_samples} of {samples} are read)"
        if both and not leak and by_chance < 0.5:
            note(f"{counts}. Samples may be equal by nature; otherwise, divide the data before you "
                 "repeat or transform samples")
        elif not leak and different * read_samples < 10 * samples and read_samples < samples:
            skip(promise, "these are too few to say it")
        else:
            check(promise, not leak, f"{counts}. Draw both sets in one call, from one split")
    of_all = [(rank["sizes"], rank["samples"])
              for name in ("one", "two", "resumed") for rank in seen.get(name, [])]
    return check("all processes, and all starts, load the same data",
                 all(samples == of_all[0] for samples in of_all), "they load other samples. Sort "
                 "what comes from a set or a folder, seed what is random (random, numpy, "
                 "pandas, scikit-learn), use no hash() of strings, and load all samples on all "
                 "ranks")


def check_ranks(first, second):
    different = [name for name, value in first["weights"].items()
                 if second["weights"].get(name) != value]
    check("all processes have the same weights at the end", not different,
          f"these differ: {some(different)}. Call ddp_model(...) in train(), and in the loss "
          "model(...), no method of it; wrap each model in DDP; set requires_grad in build_model")
    different = [name for name, value in first["others"].items()
                 if second["others"].get(name) != value]
    if different:
        check("what is saved is the same on all processes", False, f"these differ: "
              f"{some(different)}. Compute them from results of all ranks, as evaluate() and "
              "results_of() return them")


def check_loss(seen, problems):
    """Return whether the loss is a mean over the samples, in evaluations and in training."""
    promise = "the loss is a mean over the samples, and the counts are sums"
    found = seen["loss"][0].get("loss") if "loss" in seen else None
    if not found:
        skip(promise, f"a loss of 16 samples, or of some of them, ends with an error:"
             f"{problems['loss']}" if "loss" in problems else
             "the loss is not called for 16 samples, or does not take any number of them")
        return True, True
    rounding, of_gradients = (2e-2, 0.1) if found["rounding"] else (1e-3, 1e-3)
    same = {}
    for mode in ("True", "False"):
        ten, three, seven = (loss for loss, *_ in found[f"training {mode}"][0])
        mean = (3 * three + 7 * seven) / 10
        same[mode] = math.isclose(mean, ten, rel_tol=rounding, abs_tol=1e-6)
    exact = not found["draws True"] and not found["changes True"]  # in training mode
    difference = found.get("gradient", 0.0)
    in_tests = found["draws False"] or same["False"]
    in_training = (same["True"] if exact else in_tests) and not (
        in_tests and difference > of_gradients)
    factor = factor_in_loss(found, in_tests)
    of_counts = [(count, whole) for four, four_times in found["training False"][1]
                 for count, whole in zip(four[1:], four_times[1:])
                 if count % 1 and math.isclose(count, whole, rel_tol=1e-3)]
    if factor or of_counts or (in_tests and in_training):
        check(promise, not factor and not of_counts,
              f"{factor}. Return a mean over the samples, not a sum, without a factor for their "
              "number" if factor else
              "the counts are means. Return sums over the samples: metrics() divides them")
        return in_tests, in_training
    what = (f"the loss of 10 samples is {ten:.4g}, and the mean of the losses of 3 and 7 of them "
            f"is {mean:.4g}")
    if in_training:
        note(f"in evaluation mode, {what}. So the test loss depends on the batch size")
        return in_tests, in_training
    if in_tests:
        what = ("the training loss of 10 samples is no mean of the losses of 3 and 7 of them"
                if exact and not same["True"] else
                f"the gradient of 10 samples differs by {difference:.2g} of its length from the "
                "mean of the gradients of 3 and 7 of them")
    note(f"{what}. So the training depends on how a batch is divided among the processes. For "
         "class weights or ignored tokens, see make-it-yours. Gather pairs from all ranks. Compute "
         "no statistics of a batch. Look for shapes that broadcast: (N, 1) and (N,)")
    return in_tests, in_training


def factor_in_loss(found, is_mean):
    """Return what shows that the loss is a sum, or divided by the number of samples, or ''."""
    ten, three, seven = (loss for loss, *_ in found["training False"][0])
    if not is_mean:
        if math.isclose(ten, three + seven, rel_tol=1e-3) or math.isclose(
                100 * ten, 9 * three + 49 * seven, rel_tol=1e-3):
            return (f"the loss of 10 samples is {ten:.4g}, and the losses of 3 and 7 of them are "
                    f"{three:.4g} and {seven:.4g}")
        return ""  # it depends on pairs, or on weights: repeated samples say nothing
    for mode in ("True", "False"):
        tolerance = 0.25 if found[f"draws {mode}"] else 1e-2
        pairs = [(four[0], four_times[0]) for four, four_times in found[f"training {mode}"][1]]
        for factor in (4, 0.25):
            if all(loss and math.isclose(of_repeated / loss, factor, rel_tol=tolerance)
                   for loss, of_repeated in pairs):
                return ("the loss of 4 samples, and of these samples four times, is "
                        f"{show(pairs[0])}")
    return ""


def check_evaluation(seen, is_mean):
    one = seen["one"][0]
    promise = "the same weights are tested alike on one and two processes"
    results = {name: ranks[0]["evaluations"][-1] for name, ranks in seen.items()
               if any(ranks[0]["evaluations"])}
    if "one" not in results:
        skip(promise, "no evaluate() is called in the first two epochs, or there are no samples")
        return
    tests = one["sizes"][1] and TEST_SAMPLES if len(one["sizes"]) > 1 else 0
    for name in ("one", "two"):
        tested = sum(rank["tested"][-1] for rank in seen.get(name, []) if rank["tested"])
        if tests and tested not in (0, tests):
            processes = "one process" if name == "one" else "two processes"
            note(f"{tested} samples are tested on {processes}, where the test set has {tests}")
    changes = ". It changes the model" if one["changes"] else ""
    if changes or "again" in results:
        again = results.get("again", results["one"])
        alike = check("the same weights give the same result when they are tested again",
                      results["one"] == again and not changes,
                      f"{show(results['one'], again)} at the end of a run, "
                      f"{show(again, results['one'])} when it is started again{changes}. Put "
                      "what is tested (an average) into saved; call model.eval() in evaluate(); "
                      "augment images, and mix samples, only if model.training; give F.dropout "
                      "training=self.training; if the evaluation must draw random numbers, call "
                      "torch.manual_seed(0) before")
        if not alike:
            return
    if one["draws"]:
        skip(promise, "the evaluation draws random numbers")
        if len({*one["draws"]}) == len(one["draws"]):
            note("the evaluation draws random numbers, other ones each time: give F.dropout "
                 "training=self.training, or call torch.manual_seed(0) before evaluate()")
        return
    if not {"test on two", "test", "whole test"} <= {*results}:
        return  # their errors are printed
    test, whole = results["test"], results["whole test"]
    ratios = [part / all_at_once if all_at_once else 1.0 for part, all_at_once in zip(test, whole)]
    alike = [math.isclose(ratio, 1, rel_tol=2e-3) for ratio in ratios]
    if rounds(seen):
        alike = [True]  # rounding decides which of two scores is the higher
    if not all(alike if is_mean else alike[1:]):  # the loss has a note of its own
        note(f"the test metrics depend on the batch size: {show(test, whole)} in batches of 4, "
             f"{show(whole, test)} in a single batch. Return counts as sums over the samples, not "
             "as means. Compute F1, a correlation or a rank from counts or outputs of all samples")
    alike[0] = alike[0] and is_mean
    pairs = [pair for pair, good in zip(zip(results["test on two"], test), alike) if good]
    if not pairs:
        skip(promise, "the results depend on the batch size")
        return
    check(promise, all(math.isclose(*pair, rel_tol=2e-2 if rounds(seen) else 2e-3, abs_tol=1e-6)
                       for pair in pairs),
          f"{show(results['test on two'], test)} on two, {show(test, results['test on two'])} on "
          "one. Test each sample once: let each rank test its share, without drop_last, and return "
          "the results of the sums over all ranks")


def check_two_processes(seen, problems, is_mean):
    one, (first, second) = seen["one"][0], seen["two"]

    def samples(step):
        return step["rows"] or [[part] for part in step["parts"]]  # of graphs, whole parts

    alone = [samples(step) for step in one["steps"]]
    of_both = [samples(step) + samples(other)
               for step, other in zip(first["steps"], second["steps"])]

    def same(place):
        """Return whether each step has the same samples, or in this place of them the same."""
        of_one, of_two = ([{row[place] for row in step if place < len(row)} for step in steps]
                          for steps in (alone, of_both))
        return of_one == of_two and (place == 0 or len(of_one[0]) > 2)

    parts, *of_ranks = (job["steps"][0]["parts"] if job["steps"] else []
                        for job in (one, first, second))
    other_division = len(parts) != sum(map(len, of_ranks))  # as of a loop without parts
    only_transformed = not same(0) and other_division and any(
        map(same, range(1, len(alone[0][0]) if alone[0] else 0)))
    rates = [(rate, other) for step, step_of_two in zip(one["steps"], first["steps"])
             for rate, other in zip(step["rates"], step_of_two["rates"])]
    promise = "one and two processes train on the same samples, at the same rates"
    same_rates = all(math.isclose(*pair, rel_tol=1e-3) for pair in rates)
    if same_rates and other_division and not any(step["rows"] for step in one["steps"]):
        skip(promise, "a batch is not made of tensors or lists with a row for each sample")
    else:
        check(promise, same_rates and (same(0) or only_transformed), (
            "the samples differ. Let the order depend on seed and epoch alone, and on the rank, "
            f"not the local rank. {SAMPLES}" if same_rates else "rates or other options of the "
            "optimizer differ. Compute them from the global batch, and call a scheduler's step() "
            "on all ranks"))
    promise = "the first gradients are the same on one and two processes"
    if only_transformed:
        skip(promise, "random transforms or padding differ")
        return
    names = ("one", "two")
    if len(parts) == 1 and {*parts} != {part for of_rank in of_ranks for part in of_rank}:
        names = "one in eval()", "two in eval()"  # dropout and BatchNorm differ
        if (seen.get("loss", [{}])[0].get("loss") or {}).get("draws False"):
            skip(promise, "the loss draws random numbers in eval()")
            return
    norms, others = ({}, {})
    for name, found in zip(names, (norms, others)):
        for step in seen[name][0]["steps"] if name in seen else ():
            for weight, norm in step["norms"].items():
                found.setdefault(weight, norm)
    broken = [problems[name] for name in names if name in problems]
    if broken or not any(norms.values()):
        skip(promise, f"the model trains in eval() with an error:{broken[0]}" if broken else
             "the optimizer computes them itself")
        return
    tolerance = 2e-2 if rounds(seen) else 1e-3
    least = 1e-4 * math.hypot(*norms.values()) / math.sqrt(len(norms))  # or rounding
    different = [name for name, value in norms.items()
                 if abs(value - others.get(name, math.inf)) > tolerance * max(value, least)]
    if different and not is_mean:
        skip(promise, "the loss is no mean over the samples")
        return
    ratios = [others.get(name, 0.0) / norms[name] for name in different if norms[name]]
    if ratios and abs(ratios[0] - 1) > 0.1 and all(
            math.isclose(ratio, ratios[0], rel_tol=1e-2) for ratio in ratios):
        remedy = (f"On two processes, they are {ratios[0]:.3g} times as large. Multiply each loss "
                  "by len(indices) * world_size / global_batch before backward() (in "
                  "synthetic_ddp, by nothing)")
    else:
        remedy = ("Call ddp_model(...) in train(), and in the loss model(...), no method of it; "
                  "call zero_grad() once, before the parts, and clip after the last part; use "
                  "random numbers of torch in the loss and in build_model, not of numpy or random; "
                  "keep no state in attributes or globals")
    check(promise, not different, f"these differ: {some(different)}. {remedy}")


def check_resume(seen, problems, has_saved):
    promise = "a stopped and resumed run ends with the same numbers"
    one = seen["one"][0]
    if "saved" not in one:
        skip(promise, "nothing is saved in the file of --checkpoint")
        return
    if len(one["steps"]) < 3:
        skip(promise, f"two epochs have only {len(one['steps'])} steps")
        return
    stopped = "stopped" in seen and seen["stopped"][0]["stopped"] and has_saved
    if not check("SIGTERM stops a run, which saves", stopped,
                 f"it does not{problems.get('stopped', '')}"):
        return
    if "resumed" not in seen:
        check(promise, False, f"the resumed run does not end{problems['resumed']}")
        return
    resumed = seen["resumed"][0]
    if len(resumed["steps"]) >= len(one["steps"]):
        check(promise, False, f"the resumed run makes all {len(one['steps'])} steps again. Load "
              "the file of --checkpoint, and let errors end the run")
        return
    before, after = ({**job["weights"], **job["saved"]} for job in (one, resumed))
    different = [place for place in before if before[place] != after.get(place)]
    different += ["test results"] * (one["evaluations"][-1:] != resumed["evaluations"][-1:])
    steps = zip(one["steps"][len(one["steps"]) - len(resumed["steps"]):], resumed["steps"])
    first, remedies = [], []
    for number, (before, after) in enumerate(steps, 1):
        for key, (name, remedy) in AFTER_A_RESUME.items():
            if before[key] != after[key]:
                first.append(f"{name} of step {number} after the resume")
                remedies.append(remedy)
    made = len(seen["stopped"][0]["steps"]) + len(resumed["steps"])
    if made != len(one["steps"]):  # other steps are compared
        first = [f"the numbers of steps ({made}, not {len(one['steps'])})"]
        remedy = WHOLE_STEPS
    elif first and "step 1 " in first[0]:
        remedy = remedies[0]
    else:
        remedy = ("Put what must survive a stop into saved, before the file of --checkpoint is "
                  "loaded: models, optimizers, schedulers, averages, counters")
    check(promise, not different, f"these differ: {some(first[:1] + different)}. {remedy}")


def rounds(seen):
    """Return whether the copy computes in bfloat16 or float16."""
    found = seen["loss"][0].get("loss") if "loss" in seen else None
    return found["rounding"] if found else "--bf16" in sys.argv


def show(results, others=()):
    """Return results as text, with enough digits to differ from others."""
    digits = 4 if [f"{result:.4g}" for result in results] != [f"{other:.4g}" for other in others] \
        else 9
    return ", ".join(f"{result:.{digits}g}" for result in results)


def some(names):
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        import torch._dynamo  # as the first optimizer does
        process(*json.load(sys.stdin))
    sys.exit(main())
