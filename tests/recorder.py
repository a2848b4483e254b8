"""Record what a script's training computes in forked processes: see forked.train_forked."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from forked import watch
from torch.optim.optimizer import (register_optimizer_step_post_hook,
                                   register_optimizer_step_pre_hook)
from torch.utils.data import Subset, TensorDataset

SCALE = 64  # of the numbers of samples, where inputs are no bytes


class Recorder:
    """What one process has done. A setup for train_forked()."""

    def __init__(self, module, rank):
        self.model = self.start = None  # of this process: at the end, and the weights at the start
        self.steps = []  # for each step, its list of batches: lists of tensors
        self.seeds = []  # for each step, a seed for each of its batches
        self.weights = []  # before each step: states of the model
        self.gradients = []  # with which each step is made, as one vector
        self.evaluations = []  # for each evaluation, its list of batches
        self.batches, self.batch_seeds = [], []  # of this step
        watch(module, loss_name(module), self.see_batch)
        watch(module, "resume", self.see_start)
        if hasattr(module, "evaluate"):
            watch(module, "evaluate", lambda *_: self.evaluations.append([]))
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)

    def see_start(self, checkpoint, run, saved, progress):
        self.model = saved["model"]
        self.start = copy.deepcopy(self.model.state_dict())

    def see_batch(self, args, model, *batch):
        batches = self.batches if model.training else self.evaluations[-1]
        batches.append([tensor.clone() for tensor in batch])
        if model.training:
            self.batch_seeds.append(torch.initial_seed())

    def before_step(self, *_):
        self.weights.append(copy.deepcopy(self.model.state_dict()))
        self.gradients.append(flat(weight.grad for weight in self.model.parameters()))

    def after_step(self, *_):
        number = len(self.steps) + 1
        assert self.batches, f"step {number}: the model is not in training mode, or is not called"
        self.steps.append(self.batches)
        self.seeds.append(self.batch_seeds)
        self.batches, self.batch_seeds = [], []


def loss_name(module):
    """Return the name of the script's loss function."""
    return "loss_of" if hasattr(module, "loss_of") else "loss_and_counts"


def loss_of(module, args, model, batch):
    """Return the mean loss of a batch by the script's loss function."""
    result = getattr(module, loss_name(module))(args, model, *batch)
    return result if loss_name(module) == "loss_of" else result[0]


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


class FewPixels(nn.Module):
    """A small model in place of a CNN: images to 10 logits, from 4 x 4 pixels in grey."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 10)

    def forward(self, images):
        grey = images.mean(1, keepdim=True)
        return self.linear(F.adaptive_avg_pool2d(grey, 4).flatten(1))


def use_small_model(module, rank=0):
    """Replace the script's model by a small one if it trains on images."""
    if hasattr(module, "fake_images"):
        module.build_model = lambda *_: FewPixels()


def record_small_model(module, rank):
    """Record the training of a small model. A setup for train_forked()."""
    use_small_model(module)
    return Recorder(module, rank)


def sets_of(module, data):
    """Return what load_data() has returned as a list: the training set, the validation set."""
    return [data] if loss_name(module) == "loss_of" else list(data)


def change_sets(module, change):
    """Let load_data return change(data, train_set) of the training set, and of the test set."""
    load_data = module.load_data

    def load_changed_data(args):
        data = sets_of(module, load_data(args))
        changed = [change(part, number == 0) for number, part in enumerate(data)]
        return changed if len(changed) > 1 else changed[0]

    module.load_data = load_changed_data


def first_samples(data, count):
    """Return so many samples of a set. A negative count: all but so many of the last ones."""
    if isinstance(data, (tuple, list)):
        return [tensor[:count] for tensor in data]
    return Subset(data, range(len(data))[:count])


def number_samples(data):
    """Write its number into all values of each input of a set. Return the numbers in the set.

    Flips and crops do not change them. They depend on the sample, not on the set: a validation set
    that is a part of the same tensors has others than the training set.
    """
    if isinstance(data, Subset):
        numbers = number_samples(data.dataset)
        return [numbers[index] for index in data.indices]
    inputs = data.tensors[0] if isinstance(data, TensorDataset) else data[0]
    numbers = torch.arange(len(inputs))
    values = numbers if inputs.dtype == torch.uint8 else numbers / SCALE
    inputs.copy_(values.view(-1, *[1] * (inputs.dim() - 1)))
    return numbers.tolist()


def with_numbers(data, train_set):
    """Return this set with numbered samples: for change_sets()."""
    number_samples(data)
    return data


def numbers_of(batches):
    """Return the numbers of the samples in these batches, after number_samples()."""
    values = [sample.flatten()[0] for batch in batches for sample in batch[0]]
    return [round(value.item() * (1 if value.dtype == torch.uint8 else SCALE)) for value in values]
