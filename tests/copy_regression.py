"""What a copy of synthetic_ddp changes to predict a number: see copies.py."""

import torch
import torch.nn as nn

RUN = "prices"  # in the checkpoint: it is only resumed under the same name
SAMPLES = "houses"  # in log lines and in the checkpoint: what is counted
METRIC = "mean absolute error"  # in log lines: the mean of what loss_and_correct returns second


def build_model(args, device):
    """Return the model and its optimizer. Each parameter group has its own peak learning rate."""
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)).to(device)
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": weights, "lr": args.lr, "weight_decay": 0.1},
                                   {"params": biases, "lr": 10 * args.lr, "weight_decay": 0.0}])

    def clip(*_):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    optimizer.register_step_pre_hook(clip)
    return model, optimizer


def load_data(args, train_set):
    """Return inputs (N, 8) and prices (N,)."""
    generator = torch.Generator().manual_seed(int(train_set))
    inputs = torch.rand(args.samples, 8, generator=generator)
    return inputs, 10 * inputs[:, 0] * inputs[:, 1] + inputs.sum(1)


def loss_and_correct(model, inputs, prices):
    """Return the sum of the squared errors, and the sum of the absolute errors, as tensors."""
    errors = model(inputs).squeeze(1) - prices
    return errors.square().sum(), errors.abs().sum()
