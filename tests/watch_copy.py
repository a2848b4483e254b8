# SPDX-License-Identifier: MIT-0
"""Train a copy in processes of check_copy.py, and record what is seen in each of them.

An interpreter imports torch once. For each order (a line of JSON in its input), it forks a process
that imports the copy and calls its train(). A class says what this job watches, and where it ends.
"""
import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import importlib.util
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback

import torch
import torch._dynamo  # as the first optimizer does: once, before the processes are forked
from check_promises import Record
from copy_samples import (cut, digest, floats, floats_of_two, in_both, is_constant, numbers,
                          random_numbers, random_state, read, rows, set_random_state, size,
                          some_rows, tensors_of)
from scratch import Guard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

with contextlib.suppress(ImportError):
    import torchvision  # noqa: F401  not in each process

SETTINGS = {"epochs": 2, "global_batch": 16, "nproc": None, "log_every": 1e9, "save_every": 1e9,
            "timeout": 1800, "workers": int(sys.platform == "linux")}  # elsewhere, it is spawned


# ---- The processes ----
def serve():
    """Do the orders one after the other. After each, print the status of its process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    os.chdir("/")
    sys.path.remove(os.path.dirname(os.path.realpath(__file__)))
    for name in ("check_promises", "copy_samples", "scratch"):
        del sys.modules[name]  # the copy may have modules of these names
    for line in sys.stdin:
        order = argparse.Namespace(**json.loads(line))
        pid = os.fork()
        if not pid:
            work(order)
        print(json.dumps(wait_for(pid, order.limit)), flush=True)


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


def work(order):
    """Train in this process, write its record, and end it."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    name = f"{order.folder}/{order.name}-{order.rank}"
    sys.stdin = open(os.devnull)
    sys.stdout = sys.stderr = open(f"{name}.log", "w", buffering=1)
    for number in (1, 2):
        os.dup2(sys.stdout.fileno(), number)
    status = 1
    try:
        os.environ.update(RANK=str(order.rank), WORLD_SIZE=str(order.size), LOCAL_RANK="0",
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(order.port),
                          TMPDIR=order.folder)
        root = f"{order.folder}/{order.root}"
        os.environ.update({name: root + place for name, place in order.homes.items()})
        os.chdir(root + order.here)
        tempfile.tempdir = order.folder
        for module in (random, sys.modules.get("numpy.random"), torch):
            if module:
                module.seed()  # another state in each process, as in a new interpreter
        torch.multiprocessing.set_start_method("fork" if sys.platform == "linux" else None,
                                               force=True)
        sys.argv = [order.path, *order.flags]
        sys.path.insert(0, os.path.dirname(root + order.path))
        job = globals()[order.kind](order, Guard(order.folder))
        job.run()
        pathlib.Path(f"{name}.json").write_text(json.dumps(dataclasses.asdict(job.record)))
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def load(path):
    """Return the copy as a module."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # to pickle its functions and classes
    spec.loader.exec_module(module)
    return module


class Enough(BaseException):
    """Ends a training before its last step."""


# ---- The jobs ----
class Training:
    """Trains to the end, and records steps, evaluations, weights and what is saved."""

    batch_size = 4  # of a process at once, in copies of cifar10_ddp

    def __init__(self, order, guard):
        self.order, self.record, self.sets = order, Record(), []
        self.alive()
        torch.save = functools.partial(self.torch_save, guard, torch.save)
        self.module = load(f"{order.folder}/{order.root}{order.path}")
        functions = vars(self.module)
        self.saved, self.progress, self.optimizers = {}, {}, []
        self.calls = []  # of the loss, of which the next step is made
        self.evaluating = False
        for name, see in (("load_data", self.see_data), ("loss_of", self.see_loss),
                          ("loss_and_counts", self.see_loss), ("evaluate", self.see_evaluation),
                          ("resume", self.see_resume)):
            if name in functions:
                functions[name] = functools.partial(see, functions[name])
        register_optimizer_step_pre_hook(self.see_step)

    def alive(self):
        """After so many seconds without another call, print where each thread is, and end."""
        faulthandler.dump_traceback_later(self.order.wait, exit=True)

    def run(self):
        begin = time.monotonic()
        args = self.settings()
        try:
            self.module.train(args)
            self.at_end(args)
        except Enough:
            if self.order.size > 1:  # as close_group() of the scripts
                torch.distributed.barrier()
                time.sleep(0.5)
        self.record.seconds = time.monotonic() - begin

    def settings(self):
        """Return what the copy's parse_args() returns, for a short training.

        The first job records its numbers: a seed by time is then that of all jobs.
        """
        args = self.module.parse_args()
        plain = {name: value for name, value in vars(args).items()
                 if isinstance(value, (int, float))}
        self.record.args = plain
        settings = {**plain, **self.order.args, **SETTINGS, "batch_size": self.batch_size,
                    "checkpoint": f"{self.order.folder}/{self.order.checkpoint}.pt"}
        if isinstance(settings.get("lr"), float):
            settings["lr"] *= 1e-3  # small steps: rounding does not grow, nothing diverges
        self.record.found_file = os.path.exists(settings["checkpoint"])
        vars(args).update({name: settings[name] for name in vars(args) if name in settings})
        return args

    def see_data(self, load_data, *arguments, **options):
        self.alive()
        return cut(load_data(*arguments, **options), self.sets)

    def see_resume(self, resume, *arguments, **options):
        for value in [*arguments, *options.values()]:
            if isinstance(value, dict) and any(
                    hasattr(item, "load_state_dict") for item in value.values()):
                self.saved = value
        self.progress = options.get("progress", arguments[-1] if arguments else {})
        return resume(*arguments, **options)

    def see_loss(self, function, *arguments, **options):
        self.alive()
        call = Call(function, arguments, options)
        before = random_numbers()
        result = self.at_loss(call)
        if self.evaluating:
            evaluation = self.record.evaluations[-1]
            evaluation["samples"] += len(rows(call.batch))
            if random_numbers() != before:
                evaluation["draws"].append(digest(before))
        elif torch.is_grad_enabled() and call.model is not None:
            modes = [part.training for part in call.model.modules()]
            self.calls.append((floats_of_two(result), digest(call.batch), rows(call.batch),
                               digest(modes)))
        return result

    def see_evaluation(self, function, *arguments, **options):
        call = Call(function, arguments, options)
        if call.model is None:  # it is no argument: nothing is compared
            return call.again()
        wraps = isinstance(call.model, DistributedDataParallel)
        call.model = call.model.module if wraps else call.model
        before = digest([*call.model.buffers()])
        self.record.evaluations.append(
            {"results": [], "samples": 0, "draws": [], "changes": False, "again": None,
             "ddp": wraps and bool(before != digest([]))})
        self.evaluating = True
        result = self.at_evaluation(call)
        self.evaluating = False
        evaluation = self.record.evaluations[-1]
        evaluation["results"] = floats(result)
        evaluation["changes"] = digest([*call.model.buffers()]) != before
        self.after_evaluation(call)
        return result

    def see_step(self, optimizer, *_):
        self.alive()
        if not any(optimizer is other for other in self.optimizers):
            self.optimizers.append(optimizer)
        names = {id(weight): name for name, weight in reversed(self.weights().items())}
        norms = {names[id(weight)]: weight.grad.detach().to_dense().double().norm().item()
                 for group in optimizer.param_groups for weight in group["params"]
                 if weight.grad is not None}
        rates = [number for group in optimizer.param_groups for name, value in sorted(group.items())
                 if name != "params" for number in floats(value)]  # and the other options
        losses, parts, samples, modes = zip(*self.calls) if self.calls else ((), (), (), ())
        self.record.steps.append(
            {"rates": rates, "modes": modes, "number": [len(part) for part in samples],
             "rows": [row for part in samples for row in part], "parts": parts,
             "losses": losses, "norms": norms})
        self.calls.clear()
        self.at_step()

    def at_loss(self, call):
        return call.again()

    def at_evaluation(self, call):
        if not self.order.rank and len(self.record.evaluations) == 1:
            torch.save(call.model.state_dict(), f"{self.order.folder}/{self.order.name} tested.pt")
        return call.again()

    def after_evaluation(self, call):
        pass

    def at_step(self):
        pass

    def at_end(self, args):
        """Record what there is at the end of a training."""
        record, weights = self.record, self.weights()
        record.weights = {name: digest(weight) for name, weight in weights.items()
                          if weight.requires_grad}
        states = {name: item.state_dict() for name, item in self.saved.items()
                  if hasattr(item, "state_dict")
                  and not isinstance(item, (torch.nn.Module, torch.optim.Optimizer))}
        record.others = numbers({**states, "progress": dict(self.progress)})
        if getattr(args, "checkpoint", None) and os.path.exists(args.checkpoint):
            saved = torch.load(args.checkpoint, map_location="cpu", weights_only=False)
            record.saved = numbers(saved)

    def weights(self):
        """Return all weights of saved models, and of the optimizers, by name."""
        found = {f"{item_name}.{name}": weight for item_name, item in self.saved.items()
                 if isinstance(item, torch.nn.Module) for name, weight in item.named_parameters()}
        known = {id(weight) for weight in found.values()}
        for place, optimizer in enumerate(self.optimizers, 1):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            found.update({f"weight {number} of optimizer {place} (of no model in saved)": weight
                          for number, weight in enumerate(weights) if id(weight) not in known})
        return found

    def torch_save(self, guard, save, item, f, *arguments, **options):
        """Let guard see a file that torch.save() opens in C++. Record files of the copy's own."""
        guard.check(f, replaces=True)
        name = os.fsdecode(f) if isinstance(f, (str, bytes, os.PathLike)) else ""
        if name and not name.startswith(f"{self.order.folder}/{self.order.name}"):
            self.record.written.append(name)
        return save(item, f, *arguments, **options)


class Preparation(Training):
    """Lets the copy download its data, once for all jobs."""

    def run(self):
        args = self.settings()
        if hasattr(self.module, "prepare_data"):
            self.module.prepare_data(args)


class Data(Training):
    """Reads samples of the data sets, and looks for those that are in both."""

    def see_data(self, load_data, *arguments, **options):
        cut(load_data(*arguments, **options), self.sets)
        self.record.sizes = [size(data) for data in self.sets]
        self.record.samples = [read(data, 20) for data in self.sets]
        if self.order.size == 1 and len(self.sets) > 1 and all(self.record.sizes[:2]):
            self.record.both = in_both(*self.sets[:2], self.alive)
        raise Enough


class Loss(Training):
    """Looks whether the first loss of 10 samples or more is a mean, in and out of training mode."""

    batch_size = 16

    def at_loss(self, call):
        if not self.evaluating and call.model is not None and len(rows(call.batch)) >= 10:
            self.record.loss = losses_of_parts(call)
            raise Enough
        return call.again()


class Gradients(Training):
    """Records the gradients of the first step in evaluation mode: without dropout."""

    def __init__(self, order, guard):
        super().__init__(order, guard)
        self.module.DDP = functools.partial(DistributedDataParallel, find_unused_parameters=True)

    def at_loss(self, call):
        if call.model is not None:
            call.model.eval()
        return call.again()

    def at_step(self):
        if len(self.record.steps) == 2 * len(self.optimizers):
            raise Enough  # each optimizer has made a step


class Evaluation(Training):
    """Evaluates given weights, on one process twice."""

    def at_evaluation(self, call):
        path = f"{self.order.folder}/one tested.pt"
        call.model.load_state_dict(torch.load(path, weights_only=False))
        call.keep_batches()
        self.before = random_state()
        return call.again()

    def after_evaluation(self, call):
        found = self.record.evaluations[-1]
        if self.order.size == 1:
            set_random_state(self.before)
            found["again"] = floats(call.again())
        raise Enough


class Stop(Training):
    """Gets SIGTERM in the second epoch, before the steps of the order's number."""

    def at_step(self):
        if len(self.record.steps) == self.order.stop:
            os.kill(os.getpid(), signal.SIGTERM)

    def run(self):
        try:
            super().run()
        except SystemExit:
            self.record.stopped = True


# ---- Calls of the loss and of evaluate() ----
class Call:
    """A call of a function of the copy: its model, and the rest of its arguments: the batch."""

    def __init__(self, function, arguments, options):
        self.function, self.arguments, self.options = function, arguments, options
        values = [*arguments, *options.values()]
        models = [value for value in values if isinstance(value, torch.nn.Module)]
        self.model = models[0] if models else None
        self.batch = [value for value in values
                      if not isinstance(value, (torch.nn.Module, argparse.Namespace))]

    def again(self, change=lambda value: value):
        """Call the function, with other values for the parts of its batch."""
        def changed(value):
            fixed = isinstance(value, (torch.nn.Module, argparse.Namespace)) or is_constant(value)
            return value if fixed else change(value)

        return self.function(*map(changed, self.arguments),
                             **{name: changed(value) for name, value in self.options.items()})

    def keep_batches(self):
        """Replace an iterator, which can be read once, by its batches."""
        def keep(value):
            return [*value] if hasattr(value, "__next__") else value

        self.arguments = [*map(keep, self.arguments)]
        self.options = {name: keep(value) for name, value in self.options.items()}


def losses_of_parts(call):
    """Return loss and counts of 10 samples, of the first 3 and the other 7, in both modes."""
    whole = bool(tensors_of(call.batch))
    model = call.model

    def loss_of(first, last):
        return call.again(lambda value: some_rows(value, first, last, whole))

    of_parts = (0, 10), (0, 3), (3, 10)
    found = {"rounds": any(weight.dtype in (torch.bfloat16, torch.float16)
                           for weight in model.parameters())}
    hook = model.register_forward_pre_hook(lambda *_: found.update(
        rounds=found["rounds"] or torch.is_autocast_enabled("cpu")))
    for mode, training in (("evaluation", False), ("training", True)):
        model.train(training)
        before, buffers = random_numbers(), digest([*model.buffers()])
        with torch.set_grad_enabled(training):
            parts = [floats_of_two(loss_of(*part)) for part in of_parts]
        found[mode] = {"parts": parts, "draws": random_numbers() != before,
                       "changes": digest([*model.buffers()]) != buffers}  # as BatchNorm does
    hook.remove()
    model.eval()
    found["difference"] = 0.0  # of the gradient of 10 samples from the mean of its parts'
    if not found["evaluation"]["draws"]:
        with contextlib.suppress(Exception):  # in evaluation mode, a loss may have no gradient
            ten, three, seven = (gradient(loss_of(*part), model) for part in of_parts)
            length = (3 * three.norm() + 7 * seven.norm()).item()
            found["difference"] = (10 * ten - 3 * three - 7 * seven).norm().item() / length
    return found


def gradient(result, model):
    """Return the gradient of a loss as one vector."""
    loss = result[0] if isinstance(result, (list, tuple)) else result
    used = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(loss, used, allow_unused=True, materialize_grads=True)
    return torch.cat([part.to_dense().flatten() for part in gradients])


if __name__ == "__main__":
    serve()
