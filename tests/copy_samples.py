# SPDX-License-Identifier: MIT-0
"""Data sets, batches and numbers of a copy, for watch_copy.py: to cut, to read, to compare."""
import collections.abc
import copy
import ctypes
import hashlib
import itertools
import pickle
import random
import sys
import time

import torch
from check_promises import TRAINING_SAMPLES, VAL_SAMPLES
from torch.utils.data import Dataset, Subset, TensorDataset


# ---- Data sets ----
def is_tensor(value):
    return isinstance(value, torch.Tensor) and value.ndim or "numpy.ndarray" in str(type(value))


def are_tensors(data):
    """Return whether data is a tuple of tensors or arrays, whose rows are samples."""
    return (isinstance(data, (tuple, list)) and len(data) > 0 and all(map(is_tensor, data))
            and len({len(part) for part in data}) == 1)


def is_data(value):
    """Return whether value is a data set, and no vocabulary, list of names, or setting."""
    if are_tensors(value) or isinstance(value, Dataset):
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
    elif all(map(is_tensor, loaded)):  # inputs, labels, validation inputs, validation labels
        groups = [tuple(group) for _, group in itertools.groupby(loaded, len)]
    else:
        groups = loaded
    shortened = []
    sets.clear()
    for group in groups:
        if is_data(group) and not (sets and are_tensors(group) and len(group) != len(groups[0])):
            sets.append(group)
            group = few(group, VAL_SAMPLES if len(sets) > 1 else TRAINING_SAMPLES)
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
    if are_tensors(data):
        return tuple(part[indices] for part in data)
    if type(data) is TensorDataset:
        return with_attributes(data, tensors=tuple(part[indices] for part in data.tensors))
    if type(data) is Subset:
        return with_attributes(data, indices=[data.indices[index] for index in indices])
    return Few(data, indices)


def with_attributes(data, **attributes):
    data = copy.copy(data)
    vars(data).update(attributes)
    return data


class Few:
    """Some samples of a data set, with its attributes: of lists of samples, those of the few."""

    def __init__(self, data, indices):
        vars(self).update(all_samples=data, indices=indices)

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        return self.all_samples[self.indices[index]]

    def __getattr__(self, name):
        if name.startswith("__") or "all_samples" not in vars(self):  # it is being unpickled
            raise AttributeError(name)
        value = getattr(self.all_samples, name)
        if callable(value) and getattr(value, "__self__", None) is self.all_samples:
            return lambda *arguments, **options: self.of_few(value(*arguments, **options))
        return self.of_few(value)

    def __setattr__(self, name, value):
        setattr(self.all_samples, name, value)

    def of_few(self, value):
        """Return what belongs to the few samples of an attribute, or of a method's result."""
        if not hasattr(value, "__len__") or isinstance(value, (str, bytes, dict)):
            return value
        if value is self.all_samples:
            return self
        if are_tensors(value) and size(value) == len(self.all_samples):
            return tuple(part[self.indices] for part in value)
        if (isinstance(value, torch.Tensor) and not value.ndim) or \
                len(value) != len(self.all_samples):
            return value
        if is_tensor(value):
            return value[self.indices]
        if isinstance(value, list):
            return [value[index] for index in self.indices]
        if isinstance(value, type(self.all_samples)):  # as of a data set's own map()
            return Few(value, self.indices)
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


def in_both(training, validation, alive):
    """Return how many different samples are in both sets, as far as they are read in 6 seconds."""
    found = []
    for data, seconds in ((training, 4), (validation, 2)):
        if type(data) is TensorDataset:
            data = data.tensors
        end = time.monotonic() + seconds * (5 if are_tensors(data) else 1)
        indices = random.Random(0).sample(range(size(data)), size(data))
        read_in_time = itertools.takewhile(lambda _: time.monotonic() < end, indices)
        found.append([sample(data, index) for index in read_in_time])
        alive()
    times = collections.Counter(found[0])
    of_validation = {*found[1]}
    return {"read": [*map(len, found)], "both": sum(value in times for value in of_validation),
            "different": len(of_validation), "once": [*times.values()].count(1)}


# ---- Batches ----
def some_rows(values, first, last, whole):
    """Return a part of a batch for some samples of it. whole: see tensors_of()."""
    if is_constant(values):
        return values
    if isinstance(values, collections.abc.Mapping):
        part = copy.copy(values)
        for name, value in values.items():
            part[name] = some_rows(value, first, last, whole)
        return part
    if whole and isinstance(values, (list, tuple)):
        parts = [some_rows(value, first, last, whole) for value in values]
        return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
    return copy.deepcopy(values[first:last])


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
                for inner, value in numbers(part, f"{place}.{key}".lstrip(".")).items()}
    return {} if isinstance(state, str) else {place: digest(state)}


def floats(result):
    """Return the numbers of a result."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        return [number for part in result for number in floats(part)]
    if is_tensor(result) or isinstance(result, torch.Tensor):
        result = torch.as_tensor(result).detach().double().sum()
    return [float(result)] if hasattr(result, "__float__") else []


def floats_of_two(result):
    """Return the loss and the counts of a result: what follows them is no metric."""
    return floats(result[:2] if isinstance(result, (list, tuple)) else result)


def random_state():
    return torch.get_rng_state(), random.getstate()


def set_random_state(state):
    torch.set_rng_state(state[0])
    random.setstate(state[1])


def random_numbers():
    """Return a text that changes when random numbers are drawn."""
    return digest(random_state())
