# SPDX-License-Identifier: MIT-0
"""Check an edited copy of cifar10_ddp, fashionmnist_ddp or cpu_ddp, on CPUs, in half a minute.

    python check_copy.py my.py [flags of my.py]

It trains my.py for two epochs on a few of its own samples: on one process, on two, and on one that
is stopped and resumed. Then it compares their data, gradients, weights and test results, and says
what differs. Start it in the folder in which my.py finds its data. It writes temporary files only.

Exit status: 0 if all is ok, 1 after a FAIL, 2 if my.py cannot be checked.
"""
import ast
import collections
import ctypes
import faulthandler
import hashlib
import importlib.util
import json
import linecache
import math
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

TRAINING_SAMPLES, TEST_SAMPLES = 54, 23  # 3 steps of 16 samples in an epoch; 6 are left out
SETTINGS = {"epochs": 2, "global_batch": 16, "batch_size": 4, "workers": 1, "nproc": None,
            "log_every": 1e9, "save_every": 1e9, "timeout": 1800}
WAIT = 60  # seconds: then processes that compute nothing are waiting for each other
SMALL_STEPS = 0.01  # of the learning rate: no copy diverges in its small batches


# ---- What each process does that trains ----
def process(task):
    """Train with the copy, once for each job of the task, and write down what was seen."""
    global torch
    import torch  # here: the process that compares needs no second for it
    path, flags = task["path"], task["flags"]
    sys.argv = [path, *flags]
    own_folder = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [os.path.dirname(path), *(place for place in sys.path if place != own_folder)]
    if sys.platform == "linux":
        torch.multiprocessing.set_start_method("fork", force=True)
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # to pickle its functions and classes
    spec.loader.exec_module(module)
    functions = vars(module).copy()  # as they are in the copy
    loaded = {}
    for job in task["jobs"]:
        seen = train(module, functions, loaded, job, task)
        with open(f"{task['folder']}/{job['name']}-{task['rank']}.json", "w") as file:
            json.dump(seen, file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler would raise an error
    for child in torch.multiprocessing.active_children():
        child.kill()
    os._exit(0)  # no second in which threads could still abort


class Enough(BaseException):
    """Ends a training after its first step."""


def train(module, functions, loaded, job, task):
    """Call the copy's train(), and return what was seen in it, as numbers and text."""
    from torch.optim.optimizer import (register_optimizer_step_post_hook,
                                       register_optimizer_step_pre_hook)
    seen = {"steps": [], "evaluations": [], "longest": 0.0, "batch_norm": False,
            "random": {"training": False, "test": False, "numpy": False, "random": False},
            "test mode": True, "test changes": False}
    evaluating, losses, batches, rates, optimizers, saved = [], [], [], {}, {}, {}
    last_sign = [time.monotonic()]

    def sign_of_life():
        now = time.monotonic()
        seen["longest"] = max(seen["longest"], now - last_sign[0])
        last_sign[0] = now
        if task["wait"]:  # then print the line in which each thread waits, and end
            faulthandler.dump_traceback_later(task["wait"], exit=True)

    def see_load_data(args):
        if not loaded:
            before = {name: repr(value) for name, value in vars(args).items()}
            sets = functions["load_data"](args)
            loaded["set by load_data"] = {name: value for name, value in vars(args).items()
                                          if before.get(name) != repr(value)}
            loaded["sets"] = [sets] if is_set_of_tensors(sets) else list(sets)
            few = [shorten(data, TEST_SAMPLES if number else TRAINING_SAMPLES)
                   for number, data in enumerate(loaded["sets"])]
            loaded["few"] = few[0] if is_set_of_tensors(sets) else few
        vars(args).update(loaded["set by load_data"])
        sign_of_life()
        return loaded["few"]

    def see_restore(checkpoint, settings, parts, *rest):
        saved.update(parts=parts)
        seen["start"] = numbers_of_models(parts)
        return functions["restore"](checkpoint, settings, parts, *rest)

    def see_loss(model, *batch, **options):
        sign_of_life()
        before = random_states()
        result = functions[loss_name](model, *batch, **options)
        drawn = [name for name, state in random_states().items() if state != before.get(name)]
        kind = "test" if evaluating else "training"
        seen["random"].update({name: True for name in [*drawn, *[kind][:len(drawn)]]})
        if evaluating:
            seen["test mode"] &= not getattr(model, "training", False)
        else:
            losses.append(floats(result))
            batches.append(digest(batch))
            seen["batch_norm"] |= "BatchNorm" in repr(model)
        return result

    def see_evaluation(*arguments, **options):
        sign_of_life()
        evaluating.append(True)
        model = arguments[0] if isinstance(arguments[0], torch.nn.Module) else torch.nn.Module()
        before = numbers(dict(model.named_buffers()))
        result = functions["evaluate"](*arguments, **options)
        seen["test changes"] |= before != numbers(dict(model.named_buffers()))
        seen["evaluations"].append(floats(result))
        evaluating.pop()
        return result

    def before_step(optimizer, *_):
        sign_of_life()
        optimizers[id(optimizer)] = optimizer
        names = {id(weight): f"{part}.{name}" for part, model in models(saved.get("parts"))
                 for name, weight in model.named_parameters()}
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        norms = {names.get(id(weight), f"weight {number}"): norm(weight.grad)
                 for number, weight in enumerate(weights) if weight.grad is not None}
        if not seen["steps"]:
            seen["unused"] = [names[id(weight)] for _, model in models(saved.get("parts"))
                              for weight in model.parameters()
                              if weight.requires_grad and weight.grad is None]
        rates[id(optimizer)] = [group.get("lr") for group in optimizer.param_groups]
        seen["steps"].append({"losses": losses.copy(), "batches": batches.copy(), "norms": norms,
                              "rates": [float(rate or 0) for rate in rates[id(optimizer)]]})
        losses.clear()
        batches.clear()
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * SMALL_STEPS

    def after_step(optimizer, *_):
        for group, rate in zip(optimizer.param_groups, rates[id(optimizer)]):
            if "lr" in group:
                group["lr"] = rate
        if job["end"] == "signal" and len(seen["steps"]) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if job["end"] == "first step":
            raise Enough

    def aside(path):
        """Return a temporary place for what the copy saves beside its checkpoint."""
        inside = os.path.dirname(path) == task["folder"]
        return path if inside else f"{task['folder']}/{job['name']}-{os.path.basename(path)}"

    def save_aside(path, *rest, **options):
        return functions["save_checkpoint"](aside(path), *rest, **options)

    loss_name = "loss_of" if "loss_of" in functions else "loss_and_correct"
    seeing = {"load_data": see_load_data, "restore": see_restore, loss_name: see_loss,
              "evaluate": see_evaluation, "save_checkpoint": save_aside}
    vars(module).update({name: see for name, see in seeing.items() if name in functions})
    module.CHECK_EVERY = 1
    args = module.parse_args()
    settings = {**SETTINGS, "batch_size": job["batch_size"],
                "checkpoint": f"{task['folder']}/{job['checkpoint']}.pt"}
    vars(args).update({name: value for name, value in settings.items() if hasattr(args, name)})
    seen["lacks"] = [name for name in ("global_batch", "checkpoint") if not hasattr(args, name)]
    handles = [register_optimizer_step_pre_hook(before_step),
               register_optimizer_step_post_hook(after_step)]
    try:
        module.train(args)
        seen["stopped"] = False
    except (Enough, SystemExit) as end:
        if job["end"] == "last step":
            raise
        seen["stopped"] = str(end)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for handle in handles:
        handle.remove()

    faulthandler.cancel_dump_traceback_later()
    parts = saved.get("parts", {})
    seen["bf16"] = bool(getattr(args, "bf16", False))
    seen["end"] = {f"{name}{place}": value for name, part in parts.items()
                   for place, value in numbers(part.state_dict()).items()}
    seen["weights"] = {f"{part}.{name}": digest(weight) for part, model in models(parts)
                       for name, weight in model.named_parameters() if weight.requires_grad}
    kept = {tensor.data_ptr() for part in parts.values() if not hasattr(part, "param_groups")
            for tensor in tensors(part.state_dict())}
    seen["outside"] = sum(weight.data_ptr() not in kept for part in parts.values()
                          for group in getattr(part, "param_groups", [])
                          for weight in group["params"] if weight.numel())
    seen["not saved"] = [type(optimizer).__name__ for optimizer in optimizers.values()
                         if not any(part is optimizer for part in parts.values())]
    if job["end"] == "last step" and "samples" not in loaded:
        # After the training: a file that is opened here would be shared by the loader's processes
        loaded["samples"] = read_samples(loaded.get("sets", []), job["all_samples"])
    seen["samples"] = loaded.get("samples")
    return seen


# ---- Samples ----
def is_set_of_tensors(data):
    """Return whether data is a tuple or list of tensors or arrays, whose rows are samples."""
    return isinstance(data, (tuple, list)) and bool(data) and all(
        hasattr(part, "shape") and len(part.shape) > 0 for part in data)


def shorten(data, count):
    """Return so many samples of a data set, evenly from all of it, some twice if it has fewer."""
    lengths = {len(part) for part in data} if is_set_of_tensors(data) else {len(data)}
    if len(lengths) > 1 or 0 in lengths:
        return data  # the copy itself should refuse it
    length = lengths.pop()
    indices = [index * length // count for index in range(count)]
    if is_set_of_tensors(data):
        return tuple(part[indices] for part in data)
    return Few(data, indices)


class Few:
    """Some samples of a data set, which has its other attributes, for these samples."""

    def __init__(self, data, indices):
        vars(self).update(whole_set=data, indices=indices)

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        return self.whole_set[self.indices[index]]

    def __getattr__(self, name):
        if name in ("whole_set", "indices") or name.startswith("__"):  # not yet unpickled
            raise AttributeError(name)
        return self.shortened(getattr(self.whole_set, name))

    def __setattr__(self, name, value):
        setattr(self.whole_set, name, value)

    def shortened(self, value):
        """Return the rows of a list, a tensor or a table that are those of the samples."""
        if isinstance(value, (tuple, list)) and is_set_of_tensors(value):
            return type(value)(self.shortened(part) for part in value)
        if not hasattr(value, "__len__") or len(value) != len(self.whole_set):
            return value
        if isinstance(value, (tuple, list)):
            return type(value)(value[index] for index in self.indices)
        if hasattr(value, "iloc"):
            return value.iloc[self.indices]
        return value[self.indices] if hasattr(value, "shape") else value


def read_samples(sets, all_of_them):
    """Return digests of samples: a few of each set, and, to compare the sets, many of two."""
    start = time.monotonic()

    def read(data, indices):
        found = {}
        for index in indices:
            if time.monotonic() > start + 10 and len(found) >= 20:
                break
            random.seed(0)
            torch.manual_seed(0)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(0)
            rows = is_set_of_tensors(data)
            found[index] = digest([part[index] for part in data] if rows else data[index])
        return found

    def evenly(length, count):
        return range(0, length, 1 + (length - 1) // count)

    lengths = [min(map(len, data)) if is_set_of_tensors(data) else len(data) for data in sets]
    result = {"lengths": lengths, "few": [[*read(data, evenly(length, 25)).values()]
                                          for data, length in zip(sets, lengths)]}
    if all_of_them and len(sets) > 1 and min(lengths[:2]) > 0:
        test = read(sets[1], evenly(lengths[1], 100))
        same_places = [index for index in test if index < lengths[0]]
        others = evenly(lengths[0], 10**6 if is_set_of_tensors(sets[0]) else 400)
        training = read(sets[0], dict.fromkeys([*same_places, *others]))
        result["read"] = len(training), len(test)
        result["in both"] = sum(value in set(training.values()) for value in test.values())
        times = collections.Counter(training.values())
        result["once"] = sum(number == 1 for number in times.values())
    return result


# ---- Numbers ----
def tensors(value):
    """Yield the tensors in a state dict."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, torch.Tensor):
        yield value


def numbers(state, place=""):
    """Return digests of the tensors and numbers of a state dict, by their places in it."""
    if isinstance(state, (list, tuple)):
        state = dict(enumerate(state))
    if isinstance(state, dict):
        return {inner: value for key, part in state.items()
                for inner, value in numbers(part, f"{place}.{key}").items()}
    plain = isinstance(state, (torch.Tensor, int, float, str))
    return {place: digest(state)} if plain else {}


def models(parts):
    """Return pairs (name, model) of what is saved."""
    return [(name, part) for name, part in (parts or {}).items()
            if isinstance(part, torch.nn.Module)]


def numbers_of_models(parts):
    return {f"{name}{place}": value for name, model in models(parts)
            for place, value in numbers(model.state_dict()).items()}


def digest(value):
    """Return a text that equal samples, or equal tensors, share."""
    found = hashlib.blake2b(digest_size=12)
    add(found, value, depth=0)
    return found.hexdigest()


def add(found, value, depth):
    """Add tensors, arrays, images, numbers, text, and what contains them, to a digest."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = (value.coalesce().values() if value.is_sparse else value).contiguous()
        found.update(ctypes.string_at(value.data_ptr(), value.numel() * value.element_size()))
    elif hasattr(value, "tobytes"):  # arrays of numpy, images
        found.update(value.tobytes())
    elif isinstance(value, (str, bytes, int, float, type(None))):
        found.update(repr(value).encode())
    elif isinstance(value, dict) and depth < 9:
        add(found, [*value.items()], depth)
    elif isinstance(value, (list, tuple)) and depth < 9:
        for part in value:
            add(found, part, depth + 1)
    elif hasattr(value, "__dict__") and depth < 9:  # a graph, a box
        add(found, vars(value), depth + 1)


def norm(gradient):
    gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(gradient.detach().double().norm())


def floats(result):
    """Return a result's numbers: the loss is the first."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        return [number for part in result for number in floats(part)]
    if isinstance(result, torch.Tensor):
        return [float(result.detach().double().sum())]
    return [float(result)] if isinstance(result, (int, float)) else []


def random_states():
    states = {"torch": digest(torch.default_generator.get_state()), "random": random.getstate()}
    if "numpy" in sys.modules:
        _, keys, *place = sys.modules["numpy"].random.get_state()
        states["numpy"] = digest([keys, place])
    return states


# ---- Start these processes ----
def run(folder, path, flags, jobs, nproc=1, wait=None):
    """Do jobs in nproc processes. Return what each rank has seen in each, and what went wrong."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    started = []
    for rank in range(nproc):
        task = {"path": path, "flags": flags, "folder": folder, "jobs": jobs, "rank": rank,
                "wait": wait}
        log = f"{folder}/{jobs[0]['name']}-{rank}.log"
        started.append((start(task, environment(rank, nproc, port), log), log))
    try:
        processes = [process for process, _ in started]
        while all(process.poll() is None or process.poll() == 0 for process in processes):
            if all(process.poll() == 0 for process in processes):
                break
            time.sleep(0.05)
        end = time.monotonic() + 30  # another process notices that one has failed, or waits
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    seen = {}
    for job in jobs:
        files = [f"{folder}/{job['name']}-{rank}.json" for rank in range(nproc)]
        if all(map(os.path.exists, files)):
            seen[job["name"]] = [json.loads(pathlib.Path(file).read_text()) for file in files]
    problem = ""
    if any(process.returncode for process in processes):
        problem = "".join(f"      rank {rank} of {nproc}{last_lines(path, process, log)}"
                          for rank, (process, log) in enumerate(started))
    return seen, problem


def start(task, env, log):
    command = [sys.executable, os.path.realpath(__file__), "--process", json.dumps(task)]
    return subprocess.Popen(command, env=env, stdout=open(log, "w"), stderr=subprocess.STDOUT,
                            stdin=subprocess.DEVNULL)


def environment(rank, nproc, port):
    """Return the variables of a process: those of a job, a pod or a notebook are not its own."""
    others = re.compile("(RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|SLURM_|PMI|OMPI_|PET_|TORCHEL"
                        "ASTIC_|GLOO_|PYTHONHASHSEED)")
    env = {name: value for name, value in os.environ.items() if not others.match(name)}
    env.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="", OMP_NUM_THREADS="1",
               WANDB_MODE="disabled", LOCAL_WORLD_SIZE="1")
    if nproc > 1:
        env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc),
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return env


def last_lines(path, process, log):
    """Return how a process has ended, and in which lines of the copy."""
    if process.returncode == 0:
        return " has ended\n"
    text = pathlib.Path(log).read_text(errors="replace")
    waits = "Timeout (" in text
    dump = text.rpartition("Timeout (" if waits else "Fatal Python error")[2]
    if waits or "Fatal Python error" in text:  # all threads, the main thread at last
        frames = re.findall(rf'File "{re.escape(path)}", line (\d+) in (\w+)',
                            dump.rpartition("(most recent call first)")[2])
        words, message = ("waits in" if waits else "is aborted in"), ""
    else:
        dump = text.rpartition("Traceback (most recent call last)")[2]
        frames = re.findall(rf'File "{re.escape(path)}", line (\d+), in (\w+)', dump)[::-1]
        lines = [line for line in dump.splitlines() if line.strip()]
        ends = [number for number, line in enumerate(lines) if re.match(r"\w[\w.]*: |error: ", line)]
        lines = lines[ends[-1]:][:2] if ends else lines[-5:]
        message = "".join(f"        {line:.400}\n" for line in lines)
        words = f"ends with status {process.returncode}" + (" in" if frames else "")
    places = [f"line {number} in {name}: {linecache.getline(path, int(number)).strip()}"
              for number, name in frames if name != "<module>"]
    return f" {words} " + "\n        called by ".join(places) + f"\n{message}"


# ---- Compare ----
class Report:
    """Prints a line for each promise."""

    def __init__(self):
        self.failed = []

    def check(self, promise, good, otherwise=""):
        """Print whether a promise holds. Return it."""
        if not good:
            self.failed.append(promise)
        print(f"ok    {promise}" if good else f"FAIL  {promise}: {otherwise}", flush=True)
        return good

    def skip(self, promise, reason):
        print(f"----  not checked: {promise}: {reason}", flush=True)

    def note(self, text):
        print(f"note  {text}", flush=True)


def close(one, other, tolerance=2e-3):
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-6) or one != one != other != other


def show(results):
    return ", ".join(f"{result:.4g}" for result in results)


def some(names):
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def job(name, checkpoint=None, batch_size=SETTINGS["batch_size"], end="last step"):
    return {"name": name, "checkpoint": checkpoint or name, "batch_size": batch_size, "end": end,
            "all_samples": name == "one"}


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-") or not os.path.isfile(sys.argv[1]):
        print(__doc__)
        sys.exit(2)
    path, flags = os.path.realpath(sys.argv[1]), sys.argv[2:]
    defined = [node.name for node in ast.walk(ast.parse(pathlib.Path(path).read_bytes()))
               if isinstance(node, ast.FunctionDef)]
    missing = {"parse_args", "load_data", "train"} - {*defined}
    if missing or not {"restore", "save_checkpoint"} & {*defined}:
        print(f"----  not checked: {sys.argv[1]} is no copy of cifar10_ddp, fashionmnist_ddp or "
              f"cpu_ddp: it has no function {some(sorted(missing) or ['restore'])}")
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(compare(Report(), os.path.realpath(folder), path, flags))


def compare(report, folder, path, flags):
    """Train, compare, and return the exit status."""
    seen, problem = run(folder, path, flags, [job("one"), job("stopped", end="signal")])
    if "one" not in seen:
        return cannot(problem, "one process")
    one = seen["one"][0]
    wait = WAIT + 5 * one["longest"]
    two, problem_of_two = run(folder, path, flags, [job("two")], 2, wait)
    if "SyncBatchNorm" in problem_of_two:
        return cannot(problem_of_two, "two processes")
    weights = "two" if two else "one"
    jobs = [job("resumed", "stopped"), job("test", weights)]
    jobs += [job("whole test", weights, batch_size=2 * TEST_SAMPLES)]
    jobs += [job("test again", "one"), job("whole step", batch_size=16, end="first step")]
    more, problem_of_more = run(folder, path, flags, jobs)
    seen.update(two)
    seen.update(more)

    if not check_data(report, seen):
        report.skip("the rest", "it would differ, too")
        return 1
    check_training(report, seen, problem_of_two)
    check_evaluation(report, seen)
    check_resume(report, seen, problem, problem_of_more, folder)
    return int(len(report.failed) > 0)


def cannot(problem, where):
    """Print why a copy cannot be checked. Return the exit status."""
    print(f"----  not checked: it does not train to its end on {where}:\n{problem}", end="")
    if "SyncBatchNorm" in problem:
        print("      It needs GPUs: check the model with BatchNorm")
    elif re.search("CUDA|NVIDIA", problem):
        print("      The check uses no GPU: use .to(device) or labels.device, not .cuda()")
    return 2


def check_data(report, seen):
    samples = seen["one"][0]["samples"]
    promise = "no test sample is a training sample"
    if not samples or "in both" not in samples:
        report.skip(promise, "there are not two sets")
    else:
        (read, tests), both = samples["read"], samples["in both"]
        share = both / tests * samples["lengths"][0] / read
        by_chance = 1 - samples["once"] / read  # rows of few values have twins in one set, too
        if both < 3 or share <= 0.5 + by_chance / 2:
            report.check(promise if not both else "most test samples are no training samples", True)
            if both:
                report.note(f"{both} of {tests} test samples are training samples, too")
        else:
            report.check(promise, False, f"{both} of {tests} are, among {read}. Draw or split both "
                         "sets in one place, from different samples")
    of_all = [rank["samples"] for name in ("one", "two", "resumed") for rank in seen.get(name, [])]
    of_all = [{key: found[key] for key in ("lengths", "few")} for found in of_all if found]
    same = all(found == of_all[0] for found in of_all)
    return report.check(
        "all processes, and all starts, load the same data", same, "sort what comes from a set or a "
        "folder, seed what is random (numpy, pandas, scikit-learn, too), and load all samples on "
        "all ranks")


def check_training(report, seen, problem):
    one, two = seen["one"][0], seen.get("two")
    promise = "two processes train to the end"
    if not report.check(promise, bool(two), f"they do not\n{problem}".rstrip()):
        if "finished reduction" in problem:
            print(f"      No loss depends on {some(one['unused']) or 'some weights'}: leave them "
                  "out of the model, or use DDP(..., find_unused_parameters=True)")
    if "start" not in one:
        report.skip("weights, and what is resumed", "restore(checkpoint, settings, saved) is not "
                    "called")
    elif two:
        different = [name for name, value in one["start"].items()
                     if any(rank["start"].get(name) != value for rank in two)]
        report.check("all processes begin with the same weights", not different, f"not "
                     f"{some(different)}: in build_model, take random numbers from torch, not numpy")
    if two and "global_batch" in one["lacks"]:
        report.skip("the gradients of one and two processes", "there is no args.global_batch")
    elif two:
        check_gradients(report, one, two, batch_loss=is_loss_of_a_batch(seen))
    check_sums(report, seen)
    trained = {name for step in one["steps"] for name, norm in step["norms"].items() if norm}
    if left := one["weights"].keys() - trained:
        report.note(f"no step trains {some(sorted(left))}: are they in the loss and the optimizer?")
    if two and "start" in one:
        different = [name for name in two[0]["weights"]
                     if two[0]["weights"][name] != two[1]["weights"].get(name)]
        report.check("all processes have the same weights at the end", not different,
                     f"not {some(different)}: call model(...), not model.module or a method of it; "
                     "wrap each model that trains in DDP; set requires_grad in build_model")
        report.check("what is optimized is part of a model in `saved`", not one["outside"],
                     f"{one['outside']} tensors of an optimizer are neither exchanged nor saved: "
                     "make them parameters of the model, or put their model into saved")


def check_gradients(report, one, two, batch_loss):
    pairs = list(zip(one["steps"], two[0]["steps"], two[1]["steps"]))
    report.check("the learning rates are the same on one and two processes",
                 all(step["rates"] == other["rates"] for step, other, _ in pairs),
                 "a step's rate is that of build_optimizer times learning_rate, on any number of "
                 "processes: it belongs to the global batch")
    promise = "the first gradients are the same on one and two processes"
    different = [norms_that_differ(step["norms"], other["norms"], 0.03 if number else 1e-3)
                 for number, (step, other, _) in enumerate(pairs)]  # rounding grows in each step
    same_losses = [equal_losses(*steps) for steps in pairs]
    if not pairs or not pairs[0][0]["norms"]:
        report.skip(promise, "the optimizer computes them itself, or makes no step")
    elif different[0] and batch_loss:
        report.note(f"the first gradients differ on two processes: {some(different[0])}. This is "
                    "right for a loss over a batch whose outputs are exchanged")
    elif different[0]:
        report.check(promise, False, f"not {some(different[0])}; the losses " + (
            "are the same: call model(...), not model.module or a method of it; keep loss * "
            "(world_size / global_batch)" if same_losses[0] else
            "differ, too: each rank reads its share of the same samples, takes random numbers from "
            "torch, and keeps nothing of earlier steps"))
    elif report.check(promise, True) and any(different):
        number = [bool(names) for names in different].index(True)
        step, *others = pairs[number]
        same_batches = sorted(step["batches"]) == sorted(sum((o["batches"] for o in others), []))
        if not same_batches and not same_losses[number]:
            report.check("and so are later ones", False, f"from step {number + 1} on, the ranks "
                         "read other samples: their order depends on seed and epoch alone")
        else:
            report.note(f"the gradients of step {number + 1} differ on two processes "
                        f"({some(different[number])}): by rounding, as with BatchNorm on few "
                        "values, or by a state that each rank keeps for itself")


def equal_losses(step, *others):
    """Return whether the ranks have together the losses of one process."""
    losses = sorted(loss for loss, *_ in step["losses"])
    of_ranks = sorted(loss for other in others for loss, *_ in other["losses"])
    return len(losses) == len(of_ranks) and all(map(close, losses, of_ranks))


def norms_that_differ(norms, others, tolerance):
    """Return the names of the tensors whose norms differ, with both."""
    whole = math.hypot(*norms.values())
    least = 1e-4 * whole / math.sqrt(len(norms) or 1)  # smaller ones may be rounding alone
    return [f"{name} ({value:.3g}, {others.get(name, math.nan):.3g})"
            for name, value in norms.items()
            if not abs(value - others.get(name, math.nan)) <= tolerance * max(value, least)]


def loss_ratio(seen, place):
    """Return by how much parts of 4 samples have a larger sum than one part of 16: 4 for means."""
    if not seen.get("whole step") or not seen["whole step"][0]["steps"]:
        return None
    parts, whole = (seen[name][0]["steps"][0]["losses"] for name in ("one", "whole step"))
    if not whole or len(parts) != 4 * len(whole) or any(len(part) <= place
                                                        for part in [*parts, *whole]):
        return None
    total, total_of_whole = (sum(part[place] for part in some) for some in (parts, whole))
    return total / total_of_whole if total_of_whole else (1.0 if not total else math.inf)


def is_noisy(seen):
    return seen["one"][0]["random"]["training"] or seen["one"][0]["batch_norm"]


def is_loss_of_a_batch(seen):
    """Return whether the loss of a batch is no sum, nor a mean, of losses of samples."""
    first, again = (seen.get(name, [{"steps": []}])[0]["steps"][:1] for name in ("one", "stopped"))
    if not again or first[0]["losses"] != again[0]["losses"]:
        return False  # it depends on what is none of the batch
    ratio = loss_ratio(seen, 0)
    most = 2 if is_noisy(seen) else 1.02
    return ratio is not None and not 1 / most <= ratio <= most and not 2.8 < ratio < 5.6


def check_sums(report, seen):
    promise = "the training's loss and metric are sums over samples"
    ratios = [loss_ratio(seen, place) for place in range(2)]
    if ratios[0] is None:
        report.skip(promise, "a step does not call the loss once for each part of its batch")
        return
    means = [name for name, ratio in zip(("loss", "metric"), ratios) if ratio and 2.8 < ratio < 5.6]
    if report.check(promise, not means, f"not the {' and the '.join(means)}: multiply a mean by "
                    "len(labels), or use reduction=\"sum\""):
        if is_loss_of_a_batch(seen):
            report.note("the sum of the losses depends on the batch size. This is right for a loss "
                        "over a batch (SupCon, triplets); a penalty is multiplied by len(labels), "
                        "and outputs and targets of a regression have the same shape")


def check_evaluation(report, seen):
    one = seen["one"][0]
    promise = "an evaluation gives the same results on one and two processes, for any batch size"
    if not one["evaluations"] or not one["evaluations"][-1]:
        report.skip("the evaluation", "evaluate() is not called in the first two epochs")
        return
    mode = "evaluate() calls model.eval(), and its results depend on the weights alone"
    again = (seen["test again"][0]["evaluations"] or [[]])[-1] if "test again" in seen else None
    if again is None:
        report.skip(mode, "a run that has ended cannot be started again")
        return
    drawn = one["random"]["test"]
    same = len(again) == len(one["evaluations"][-1]) and all(
        close(a, b, 1e-5) for a, b in zip(again, one["evaluations"][-1]))
    training = not one["test mode"]
    if training and (drawn or one["test changes"]):
        report.check(mode, False, "the model is in training mode, with dropout or BatchNorm")
        return
    if one["test changes"]:
        report.check(mode, False, "it changes the model's buffers")
        return
    remedy = ("call torch.manual_seed(0) before evaluate(), which draws random numbers" if drawn else
              "what is tested, such as an average of the weights, belongs into saved, before "
              "restore()")
    if not report.check(mode, same, f"{show(one['evaluations'][-1])} at the end of a run, "
                        f"{show(again)} when it is started again: {remedy}"):
        return
    if drawn:
        report.skip(promise, "the evaluation draws random numbers")
        return
    if "two" not in seen or "whole test" not in seen:
        report.skip(promise, "two processes do not train to the end")
        return
    two, test, whole = ((seen[name][0]["evaluations"] or [[]])[-1]
                        for name in ("two", "test", "whole test"))
    tolerance = 0.03 if one["bf16"] else 2e-3
    ratios = [part / all_of_it if all_of_it else 1.0 for part, all_of_it in zip(test, whole)]
    means = [number for number, ratio in enumerate(ratios) if 4.5 < ratio < 9]
    if means:
        report.check(promise, False, f"{show(test)} with batches of 4, {show(whole)} with one: return "
                     "sums over samples, of the loss and of the metric: a mean times len(labels)")
    elif not close(test[0], whole[0], tolerance):
        report.note(f"test results depend on the batch size: {show(test)}, {show(whole)}. This is right for a "
                    "loss over a batch (SupCon, triplets), else return sums over samples")
    else:
        report.check(promise, close(two[0], test[0], tolerance), f"{show(two)} on two, {show(test)} on one: "
                     "each rank tests its share, and the sums of all are added up")
        if any(abs(a - b) > 0.1 * max(abs(a), abs(b)) for a, b in zip(test[1:], whole[1:])):
            report.note(f"the metric depends on the batch size: {show(test)}, {show(whole)}. One that is no "
                        "mean over samples (F1, AUC) is computed from all ranks' samples")


def check_resume(report, seen, problem, problem_of_more, folder):
    one = seen["one"][0]
    promise = "a stopped and resumed run ends with the same numbers"
    if "checkpoint" in one["lacks"] or "start" not in one:
        report.skip(promise, "there is no args.checkpoint, or no restore()")
        return
    stopped = seen.get("stopped", [{"stopped": False}])[0]["stopped"]
    if not report.check("SIGTERM stops a run, which saves", stopped is not False
                        and os.path.exists(f"{folder}/stopped.pt"),
                        f"it does not\n{problem}".rstrip()):
        return
    if "resumed" not in seen:
        report.check(promise, False, f"it does not end\n{problem_of_more}".rstrip())
        return
    resumed = seen["resumed"][0]
    different = [place for place, value in one["end"].items() if resumed["end"].get(place) != value]
    report.check(promise, not different,
                 f"not {some(different)}: {why_other_numbers(one, resumed)}")
    if one["evaluations"] and resumed["evaluations"] and not different:
        results = one["evaluations"][-1], resumed["evaluations"][-1]
        report.check("and with the same test results", results[0] == results[1],
                     f"{show(results[1])}, not {show(results[0])}: what is tested, such as an average of the "
                     "weights, belongs into saved, before restore()")
def why_other_numbers(one, resumed):
    """Return the remedy, by what is the first to differ in the resumed run."""
    steps = zip(one["steps"][len(one["steps"]) - len(resumed["steps"]):], resumed["steps"])
    different = [(number, key) for number, (before, after) in enumerate(steps)
                 for key in ("rates", "losses", "norms") if before[key] != after[key]]
    if different and different[0][1] == "rates":
        return "the learning rate is another one: put its scheduler into saved, before restore()"
    if different and different[0] == (0, "losses"):
        drawn = [name for name in ("numpy", "random") if one["random"][name]]
        return ("the first loss after the resume is another one. " +
                (f"The loss draws random numbers of {' and '.join(drawn)}: take torch's"
                 if drawn else "What must survive a stop (a counter, a queue, a hidden state, a "
                 "generator) is a buffer of the model, or in saved before restore(); random "
                 "numbers are torch's, or those of numpy get a seed for each sample"))
    if one["not saved"]:
        return (f"an optimizer ({some(one['not saved'])}) is not in saved: put it there, and its "
                "model, before restore()")
    if different and different[0] == (0, "norms"):
        return ("the first loss after the resume is the same, but not the gradient: are gradients "
                "of the step before kept? Call optimizer.zero_grad() before each step")
    return "what changes in each step belongs into saved, before restore()"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        process(json.loads(sys.argv[2]))
    else:
        main()
