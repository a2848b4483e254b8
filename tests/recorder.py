"""Record what a script's training does in forked processes: see functions.train."""

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from scripts import SCRIPTS
from torch.optim.optimizer import (register_optimizer_step_post_hook,
                                   register_optimizer_step_pre_hook)
from torch.utils.data import TensorDataset


class Part(NamedTuple):
    """One call of the model."""

    seed: int  # of the random numbers
    inputs: torch.Tensor
    targets: torch.Tensor
    outputs: torch.Tensor

    def numbers(self):
        """Return the numbers of the samples, after number_samples."""
        return [int(sample.flatten()[0]) for sample in self.inputs]


class Recorder:
    """What one process has done."""

    def __init__(self, module, script):
        self.steps = []  # for each step, its list of Parts
        self.gradients = []  # for each step, those of all parameters, as one vector
        self.evaluations = []  # for each evaluation, its list of Parts
        parts = []  # of this step
        name = SCRIPTS[script].loss_function
        loss_function = getattr(module, name)

        def recorded_loss(model, inputs, targets):
            outputs = []
            hook = model.register_forward_hook(
                lambda model, arguments, output: outputs.append(output.detach()))
            result = loss_function(model, inputs, targets)
            hook.remove()
            part = Part(torch.initial_seed(), inputs.clone(), targets.clone(), outputs[0])
            if model.training:
                parts.append(part)
            elif self.evaluations:  # not in wrap_ddp
                self.evaluations[-1].append(part)
            return result

        def before_step(optimizer, *_):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.gradients.append(torch.cat([p.grad.flatten().clone() for p in parameters]))

        def after_step(*_):
            self.steps.append(list(parts))
            parts.clear()

        setattr(module, name, recorded_loss)
        register_optimizer_step_pre_hook(before_step)
        register_optimizer_step_post_hook(after_step)
        if hasattr(module, "evaluate"):
            evaluate = module.evaluate

            def recorded_evaluate(*arguments):
                self.evaluations.append([])
                return evaluate(*arguments)

            module.evaluate = recorded_evaluate


def number_samples(module):
    """Give all values of a sample the sample's number, which flips and crops do not change."""
    load_data = module.load_data

    def load_numbered_data(*arguments, **options):
        data = load_data(*arguments, **options)
        inputs = data.tensors[0] if isinstance(data, TensorDataset) else data[0]
        numbers = torch.arange(len(inputs), dtype=inputs.dtype)
        inputs.copy_(numbers.view(-1, *[1] * (inputs.dim() - 1)))
        return data

    module.load_data = load_numbered_data


class FewPixels(nn.Module):
    """A small model in place of a CNN: images to 10 logits, from 4 x 4 pixels in grey."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 10)

    def forward(self, images):
        grey = images.mean(1, keepdim=True)
        return self.linear(F.adaptive_avg_pool2d(grey, 4).flatten(1))


def use_small_model(module, script):
    """Replace the script's CNN, if it has one, by a small model that SGD trains."""
    def build_model(args, *_):
        model = FewPixels()
        return model, torch.optim.SGD(model.parameters(), lr=args.lr)

    if SCRIPTS[script].has_images:
        module.build_model = build_model
