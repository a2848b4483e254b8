"""Record what a script's training computes in forked processes: see forked.train_forked."""

import copy
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from forked import watch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (register_optimizer_step_post_hook,
                                   register_optimizer_step_pre_hook)


class Part(NamedTuple):
    """One call of the model."""
    seed: int  # of the random numbers
    batch: list  # its tensors
    outputs: torch.Tensor
    gradient: torch.Tensor  # of the sum of the losses: in training, by autograd alone

    def numbers(self):
        """Return the numbers of the samples, after number_samples."""
        return [int(sample.flatten()[0]) for sample in self.batch[0]]


class Recorder:
    """What one process has done. A setup for train_forked()."""

    def __init__(self, module, rank):
        self.steps = []  # for each step, its list of Parts
        self.gradients = []  # for each step, those with which it is made, as one vector
        self.rates = []  # for each step, the learning rates of the optimizer's groups
        self.evaluations = []  # for each evaluation, its list of Parts
        self.parts = []  # of this step
        name = loss_name(module)
        loss_function = getattr(module, name)
        setattr(module, name, lambda *arguments: self.call_loss(loss_function, *arguments))
        if hasattr(module, "evaluate"):
            watch(module, "evaluate", lambda *_: self.evaluations.append([]))
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)

    def call_loss(self, loss_function, *arguments):
        means = not isinstance(arguments[0], nn.Module)  # but for mnist_dp, which has no args here
        before, (model, *batch) = arguments[:means], arguments[means:]
        outputs = []
        seed = torch.initial_seed()
        hook = model.register_forward_hook(lambda _, arguments, output: outputs.append(output))
        gradient = None
        if model.training:
            plain = model.module if isinstance(model, DistributedDataParallel) else model
            plain = copy.deepcopy(plain)  # its BatchNorm counts this call, too
            with torch.random.fork_rng(devices=[]):
                loss = first(loss_function(*before, plain, *batch))
                loss = loss * len(batch[0]) if means else loss
            gradient = flat(torch.autograd.grad(loss, list(plain.parameters())))
        result = loss_function(*arguments)
        hook.remove()
        parts = self.parts if model.training else self.evaluations[-1]
        batch = [tensor.clone() for tensor in batch]
        parts.append(Part(seed, batch, first(outputs[-1]).detach(), gradient))
        return result

    def before_step(self, optimizer, *_):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.gradients.append(flat([parameter.grad for parameter in parameters]))
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def after_step(self, *_):
        number = len(self.steps) + 1
        assert self.parts, f"step {number}: the model is not in training mode, or is not called"
        self.steps.append(self.parts)
        self.parts = []


def loss_name(module):
    """Return the name of the script's loss function."""
    names = ("loss_of", "loss_and_counts", "loss_and_correct")
    return next(name for name in names if hasattr(module, name))


def first(result):
    """Return the loss, or the output, of a function or model that may return more."""
    return result[0] if isinstance(result, tuple) else result


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


class FewPixels(nn.Module):
    """A small model in place of a CNN: images to 10 logits, from 4 x 4 pixels in grey."""

    def __init__(self, bf16=False):
        super().__init__()
        self.linear = nn.Linear(16, 10)

    def forward(self, images):
        grey = images.mean(1, keepdim=True)
        return self.linear(F.adaptive_avg_pool2d(grey, 4).flatten(1))


def use_small_model(module, rank=0):
    """Replace the script's model by a small one, if it can, with the rates --lr and 0.02 of it."""
    def build_model(*_):
        return nn.Linear(20, 1) if hasattr(module, "loss_of") else FewPixels()

    def build_optimizer(args, model, *_):
        weight, bias = model.parameters()
        groups = [{"params": [weight]}, {"params": [bias], "lr": 0.02 * args.lr}]
        return torch.optim.SGD(groups, lr=args.lr)

    if hasattr(module, "learning_rate"):
        module.build_model = build_model
        module.build_optimizer = build_optimizer
    elif hasattr(module, "CNN"):
        module.CNN = FewPixels


def record_small_model(module, rank):
    """Record the training of a small model. A setup for train_forked()."""
    use_small_model(module)
    return Recorder(module, rank)


def change_sets(module, change):
    """Let load_data return change(data, train_set) of the training set, and of the test set."""
    load_data = module.load_data

    def load_changed_data(args):
        data = load_data(args)
        if hasattr(module, "loss_of"):  # cpu_ddp has no test set
            return change(data, True)
        return [change(data, train_set) for data, train_set in zip(data, (True, False))]

    module.load_data = load_changed_data
