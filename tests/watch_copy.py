# SPDX-License-Identifier: MIT-0
"""Train a copy in a process of check_copy.py, and record what is seen in it.

An interpreter imports torch once. For each order (a job), it forks a process that imports the copy
and calls its train(). A class says what this job watches, and where it ends.
"""
import argparse
import collections.abc
import contextlib
import copy
import ctypes
import dataclasses
import faulthandler
import functools
import hashlib
import itertools
import json
import os
import pathlib
import pickle
import random
import signal
import sys
import time

import torch
import torch._dynamo  # as the first optimizer does: once, before the processes are forked
from scratch import Record, load, serve
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, Subset

with contextlib.suppress(ImportError):
    import torchvision  # noqa: F401  not in each process

SETTINGS = {"epochs": 2, "nproc": None, "log_every": 1e9, "save_every": 1e9,
            "timeout": 1800, "workers": int(sys.platform == "linux")}  # elsewhere, it is spawned


# ---- The process of a job ----
def work(order):
    """Do a job in this process, and write its record."""
    torch.multiprocessing.set_start_method("fork" if sys.platform == "linux" else None, force=True)
    job = globals()[order.kind](order)
    job.run()
    record = json.dumps(dataclasses.asdict(job.record))
    pathlib.Path(f"{order.folder}/{order.name}-{order.rank}.json").write_text(record)


# ---- The jobs ----
class Enough(BaseException):
    """Ends a training before its last step."""


class Training:
    """Trains to the end, and records steps, evaluations, weights and what is saved."""

    batch_size = 4  # of a process at once, in copies of cifar10_ddp

    def __init__(self, order):
        self.order, self.record = order, Record()
        self.alive()
        torch.save = functools.partial(save, torch.save)
        enter = torch.autocast.__enter__
        torch.autocast.__enter__ = lambda autocast: self.see_autocast(enter, autocast)
        self.module = load(f"{order.folder}/{order.root}{order.path}")
        functions = vars(self.module)
        self.saved, self.progress, self.optimizers = {}, {}, []
        self.calls = []  # of the loss, of which the next step is made
        self.evaluation = None  # what is seen in a call of evaluate()
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
                    "global_batch": self.order.global_batch,
                    "checkpoint": f"{self.order.folder}/{self.order.root}.pt"}
        if isinstance(settings.get("lr"), float):
            settings["lr"] *= 1e-3  # small steps: rounding does not grow, nothing diverges
        self.record.found_file = os.path.exists(settings["checkpoint"])
        vars(args).update({name: settings[name] for name in vars(args) if name in settings})
        return args

    def see_data(self, load_data, *arguments, **options):
        self.alive()
        return cut(load_data(*arguments, **options), [], self.order.samples)

    def see_resume(self, resume, checkpoint, run, saved, progress):
        self.saved, self.progress = saved, progress
        return resume(checkpoint, run, saved, progress)

    def see_autocast(self, enter, autocast):
        if autocast._enabled:
            self.record.tolerance = 2e-2
        return enter(autocast)

    def see_loss(self, function, *arguments, **options):
        self.alive()
        call = Call(function, arguments, options)
        before = random_numbers()
        result = call.of_samples() if self.evaluation else self.at_loss(call)
        if self.evaluation and call.model is not None:
            self.evaluation["draws"] |= call.draws or random_numbers() != before
            self.evaluation["dropout"] |= any(isinstance(part, torch.nn.Dropout) and part.training
                                              for part in call.model.modules())
        elif torch.is_grad_enabled() and call.model is not None:
            shapes = [str([*part.shape[1:]]) for part in parts_of(call.batch) if is_tensor(part)]
            self.calls.append((floats(result)[:1], rows(call.batch), shapes))
        return result

    def see_evaluation(self, function, *arguments, **options):
        """The first time, two processes evaluate the weights of the single one."""
        call = Call(function, arguments, options)
        if call.model is None:  # it is no argument: nothing is compared
            return call.again()
        first, path = not self.record.evaluations, f"{self.order.folder}/one tested.pt"
        model = getattr(call.model, "module", call.model)  # that of DDP
        own = copy.deepcopy(model.state_dict())
        if first and self.order.name == "one":
            torch.save(own, path)
        if first and self.order.size > 1:
            model.load_state_dict(torch.load(path, weights_only=False))
        self.evaluation = {"draws": False, "dropout": False}
        result = call.again()
        self.record.evaluations.append({**self.evaluation, "results": floats(result)})
        self.evaluation = None
        if first and self.order.size > 1:
            model.load_state_dict(own)
        return result

    def see_step(self, optimizer, *_):
        self.alive()
        if not any(optimizer is other for other in self.optimizers):
            self.optimizers.append(optimizer)
        names = {id(weight): name for name, weight in reversed(self.weights().items())}
        weights = [weight for group in optimizer.param_groups for weight in group["params"]
                   if weight.grad is not None]
        norms = {names[id(weight)]: weight.grad.detach().to_dense().double().norm().item()
                 for weight in weights}
        if any(weight.grad.dtype.itemsize < 4 for weight in weights):
            self.record.tolerance = 2e-2
        rates = [number for group in optimizer.param_groups for name, value in sorted(group.items())
                 if name != "params" for number in floats(value)]  # and the other options
        self.record.steps.append(
            {"rates": rates, "norms": norms, "losses": [losses for losses, _, _ in self.calls],
             "rows": [row for _, samples, _ in self.calls for row in samples],
             "shapes": [shapes for _, _, shapes in self.calls]})
        self.calls.clear()
        self.at_step()

    def at_loss(self, call):
        return call.again()

    def at_step(self):
        pass

    def at_end(self, args):
        """Record what there is at the end of a training."""
        weights = {name: weight for name, weight in self.weights().items() if weight.requires_grad}
        self.record.state = {name: digest(weight) for name, weight in weights.items()}
        for name, item in self.saved.items():
            if hasattr(item, "state_dict") and not isinstance(
                    item, (torch.nn.Module, torch.optim.Optimizer)):
                self.record.state[name] = digest(item.state_dict())
        self.record.state.update({name: digest(value) for name, value in self.progress.items()})
        is_saved = os.path.exists(getattr(args, "checkpoint", None) or "")
        self.record.saved = is_saved if is_saved or self.saved else None

    def weights(self):
        """Return all weights of saved models, and of the optimizers, by name."""
        found = {f"{item_name}.{name}": weight for item_name, item in self.saved.items()
                 if isinstance(item, torch.nn.Module) for name, weight in item.named_parameters()}
        known = {id(weight) for weight in found.values()}
        others = [weight for optimizer in self.optimizers for group in optimizer.param_groups
                  for weight in group["params"] if id(weight) not in known]
        return {**found, **{f"weight {number} of no model in saved": weight
                            for number, weight in enumerate(others)}}


class Preparation(Training):
    """Lets the copy download its data, once for all jobs."""

    def run(self):
        args = self.settings()
        if hasattr(self.module, "prepare_data"):
            self.module.prepare_data(args)


class Data(Training):
    """Reads samples of the data sets, in a random order: as many as it can in 3 seconds."""

    def see_data(self, load_data, *arguments, **options):
        sets = []
        cut(load_data(*arguments, **options), sets, self.order.samples)
        for data in sets:
            order = random.Random(0).sample(range(size(data)), size(data))
            end = time.monotonic() + 3
            in_time = itertools.takewhile(lambda _: time.monotonic() < end, order[20:])
            samples = [sample(data, place) for place in itertools.chain(order[:20], in_time)]
            self.record.data.append({"size": size(data), "samples": samples})
        raise Enough


class Loss(Training):
    """Looks whether the first loss of 10 samples or more is a mean, in and out of training mode."""

    batch_size = 16

    def at_loss(self, call):
        if self.evaluation or call.model is None or len(rows(call.batch)) < 10:
            return call.again()
        for mode, training in (("evaluation", False), ("training", True)):
            call.model.train(training)
            before = random_numbers(), digest([*call.model.buffers()])
            with torch.set_grad_enabled(training):
                losses = [floats(call.of_samples(lambda value: some_rows(value, *part)))[0]
                          for part in ((0, 10), (0, 3), (3, 10))]
            after = random_numbers(), digest([*call.model.buffers()])
            self.record.loss[mode] = {"losses": losses, "varies": after != before}
        raise Enough


class Gradients(Training):
    """Records the gradients of two steps in evaluation mode: without dropout and BatchNorm.

    augment() returns its batch. Random numbers of a Dataset and in the loss are those of a sample.
    """

    def __init__(self, order):
        super().__init__(order)
        Few.seeded = True
        if hasattr(self.module, "augment"):
            self.module.augment = functools.partial(self.see_augment, self.module.augment)

    def see_augment(self, function, *arguments, **options):
        call = Call(function, arguments, options)
        if not any(isinstance(value, argparse.Namespace) for value in arguments):
            return call.again()  # another function of this name
        return call.batch if len(call.batch) > 1 else call.batch[0]

    def at_loss(self, call):
        if call.model is not None:
            call.model.eval()
        return call.of_samples()

    def at_step(self):
        if len(self.record.steps) == 2 * len(self.optimizers):
            raise Enough  # each optimizer has made two steps


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


# ---- Calls of the loss and of evaluate(), and their batches ----
class Call:
    """A call of a function of the copy: its model, and the rest of its arguments: the batch."""

    def __init__(self, function, arguments, options):
        self.function, self.arguments, self.options = function, arguments, options
        values = [*arguments, *options.values()]
        models = [value for value in values if isinstance(value, torch.nn.Module)]
        self.model = models[0] if models else None
        self.batch = [value for value in values if not is_constant(value)]
        self.draws = False  # random numbers of torch, those of its samples

    def again(self, change=lambda value: value):
        """Call the function, with other values for the parts of its batch."""
        return self.function(*map(change, self.arguments), **{
            name: change(value) for name, value in self.options.items()})

    def of_samples(self, change=lambda value: value):
        """Call it. If it draws random numbers of torch, draw those of its samples instead."""
        state = torch.get_rng_state()
        result = self.again(change)
        if torch.equal(torch.get_rng_state(), state):
            return result
        self.draws = True
        torch.set_rng_state(state)
        samples = rows([change(value) for value in self.batch])
        with OfSamples([int(sample[0], 16) % 2**63 for sample in samples]):
            return self.again(change)


class OfSamples(TorchDispatchMode):
    """Draws random numbers for each sample of a batch by a seed of its own."""

    def __init__(self, seeds):
        super().__init__()
        self.seeds = seeds

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        draw = functools.partial(function, **(options or {}))
        returns = [str(result.type) for result in function._schema.returns]
        draws = torch.Tag.nondeterministic_seeded in function.tags and returns == ["Tensor"]
        if not draws or not any(self.row(value, 0) is not value for value in arguments):
            return draw(*arguments)
        state = torch.get_rng_state()
        drawn = []
        for number, seed in enumerate(self.seeds):
            torch.default_generator.manual_seed(seed)
            drawn.append(draw(*[self.row(value, number) for value in arguments]))
        torch.set_rng_state(state)
        return arguments[0] if function._schema.is_mutable else torch.cat(drawn)

    def row(self, value, number):
        """Return an argument for a single sample: of a tensor, its row, and of a shape, [1, ...]"""
        count = len(self.seeds)
        if isinstance(value, torch.Tensor) and value.shape[:1] == (count,):
            return value[number:number + 1]
        return [1, *value[1:]] if isinstance(value, list) and value[:1] == [count] else value


def some_rows(values, first, last):
    """Return a part of a batch for some samples of it."""
    if is_constant(values):
        return values
    if isinstance(values, collections.abc.Mapping):
        part = copy.copy(values)
        for name, value in values.items():
            part[name] = some_rows(value, first, last)
        return part
    return copy.deepcopy(values[first:last])


def is_constant(value):
    """Return whether an argument is no part of a batch: a model, settings, a number."""
    return (value is None
            or isinstance(value, (torch.nn.Module, argparse.Namespace, int, float, str))
            or isinstance(value, torch.Tensor) and not value.ndim)


def parts_of(batch):
    """Return what a batch is made of: usually tensors, with a row for each sample."""
    parts = []
    for part in batch:
        parts += part.values() if isinstance(part, collections.abc.Mapping) else [part]
    return [part for part in parts if not is_constant(part)]


def rows(batch):
    """Return digests of each sample of a batch, and of each of its parts. Of a graph: []."""
    parts = parts_of(batch)
    try:
        [count] = {len(part) for part in parts}
        return [[digest([part[index] for part in parts]), *(digest(part[index]) for part in parts)]
                for index in range(count)]
    except (TypeError, KeyError, ValueError):
        return []


# ---- Data sets ----
def is_tensor(value):
    return isinstance(value, torch.Tensor) and value.ndim or "numpy.ndarray" in str(type(value))


def are_tensors(data):
    """Return whether data is a tuple of tensors or arrays, whose rows are samples."""
    return (isinstance(data, (tuple, list)) and len(data) > 0 and all(map(is_tensor, data))
            and len({len(part) for part in data}) == 1)


def is_data(value):
    """Return whether value is a data set: tensors, a Dataset, or a list of pairs."""
    return (are_tensors(value) or hasattr(value, "__getitems__")
            or isinstance(value, Dataset) and hasattr(value, "__len__")
            or isinstance(value, list) and len(value) > 3 and isinstance(value[0], (tuple, dict)))


def cut(loaded, sets, counts):
    """Return what load_data() returned with few samples of each data set. Add the sets to sets.

    counts: of training samples, and of validation samples.
    """
    if is_data(loaded) and (len(sets) < 2 or isinstance(loaded, Dataset)):
        sets.append(loaded)
        return few(loaded, counts[len(sets) > 1])
    if isinstance(loaded, dict):
        return {name: cut(part, sets, counts) for name, part in loaded.items()}
    if not isinstance(loaded, (tuple, list)) or is_data(loaded):
        return loaded
    if all(map(is_tensor, loaded)):  # x, y, x_val, y_val: sets of equal lengths
        groups = [tuple(group) for _, group in itertools.groupby(loaded, len)]
        return [part for group in groups for part in cut(group, sets, counts)]
    return [cut(part, sets, counts) for part in loaded]


def size(data):
    return len(data[0]) if are_tensors(data) else len(data)


def few(data, count):
    """Return so many samples of a data set, from all of it, and some twice if it has fewer."""
    if not size(data):
        return data
    indices = [index * size(data) // count for index in range(count)]
    if are_tensors(data):
        return tuple(part[indices] for part in data)
    if isinstance(data, list):
        return [data[index] for index in indices]
    if type(data) is Subset:
        return Few(data.dataset, [data.indices[index] for index in indices])
    return Few(data, indices)


class Few(Subset):
    """Some samples of a data set, with its attributes: of labels, those of these samples."""
    seeded = False  # each sample has random numbers of its own

    def __getitem__(self, index):
        if self.seeded and isinstance(index, int):
            seed(index)
        return super().__getitem__(index)

    def __getitems__(self, indices):
        return [self[index] for index in indices]

    def __getattr__(self, name):
        if name == "dataset":  # while this object is unpickled
            raise AttributeError(name)
        value = getattr(self.dataset, name)
        if (is_tensor(value) or isinstance(value, list)) and len(value) == len(self.dataset):
            return value[self.indices] if is_tensor(value) else [value[i] for i in self.indices]
        return value


def seed(number):
    """Seed the random numbers of torch, Python and numpy."""
    random.seed(number)
    torch.default_generator.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def sample(data, index):
    """Return a text that equal samples share, also if they are transformed at random."""
    seed(0)
    return digest([part[index] for part in data] if are_tensors(data) else data[index])


# ---- Numbers ----
def save(function, obj, f, *arguments, **options):
    """torch.save(), which opens a file in C++, where the guard does not see it."""
    is_path = isinstance(f, (str, os.PathLike))
    with open(f, "wb") if is_path else contextlib.nullcontext(f) as file:
        function(obj, file, *arguments, **options)


def digest(value):
    """Return a text that equal samples, or equal tensors, share."""
    if isinstance(value, torch.Tensor):
        value = value.detach().to_dense().contiguous()
        content = ctypes.string_at(value.data_ptr(), value.numel() * value.element_size())
    elif isinstance(value, (list, tuple, dict)):
        if isinstance(value, dict):  # a loaded state may have another order
            value = sorted(value.items(), key=lambda item: str(item[0]))
        content = "".join(map(digest, value)).encode()
    else:
        try:
            content = pickle.dumps(value)
        except Exception:
            content = str(type(value)).encode()
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def floats(result):
    """Return the numbers of a result."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        return [number for part in result for number in floats(part)]
    if is_tensor(result) or isinstance(result, torch.Tensor):
        result = torch.as_tensor(result).detach().double().sum()
    return [float(result)] if hasattr(result, "__float__") else []


def random_numbers():
    """Return a text that changes when random numbers are drawn."""
    return digest([torch.get_rng_state(), random.getstate()])


if __name__ == "__main__":
    serve(work)
