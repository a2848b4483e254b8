"""A copy for one's own model and data is made by replacing functions: see copies.py.

The copies of the pages are in test_readme_code.py.
"""

import weakref

import pytest
import torch
from checkpoints import assert_equal
from copies import make_copy
from recorder import Recorder, use_small_model
from stopped_runs import finish, stop

# ---- fashionmnist_ddp: three tensors in a batch, and a branch of the model that only trains ----
WEIGHTED = """
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)
        self.auxiliary = nn.Linear(16, 3)

    def forward(self, inputs):
        hidden = F.dropout(self.hidden(inputs).relu(), 0.1, self.training)
        if self.training:
            return self.head(hidden), self.auxiliary(hidden)
        return self.head(hidden)


def build_model(args, device):
    model = Branches().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr)


def load_data(args, train_set):
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(int(train_set)))
    return inputs, inputs[:, :3].argmax(1), inputs[:, 3].abs()


def loss_and_correct(model, inputs, labels, weights):
    outputs = model(inputs)
    outputs, *others = outputs if model.training else (outputs,)
    losses = F.cross_entropy(outputs, labels, reduction="none")
    for output in others:
        losses = losses + 0.3 * F.cross_entropy(output, labels, reduction="none")
    return (weights * losses).sum(), (weights * (outputs.argmax(1) == labels)).sum()
"""
THREE_TENSORS = [  # the lines of train() that name x and y
    ("", WEIGHTED),
    ('instead of "x, y = (tensor.to(device)"',
     "x, y, z = (tensor.to(device) for tensor in load_data(args, train_set=True))"),
    ('instead of "test_x, test_y = ("',
     "test_x, test_y, test_z = (tensor[rank::world_size].split(args.batch_size)\n"
     "                          for tensor in load_data(args, train_set=False))"),
    ('instead of "x[indices], y[indices]"',
     "loss, correct = loss_and_correct(ddp_model, x[indices], y[indices], z[indices])"),
    ('instead of "zip(test_x, test_y)"',
     "test_loss, test_accuracy = evaluate(model, zip(test_x, test_y, test_z), device)"),
]

# ---- cifar10_ddp: images and masks, transformed together ----
MASKS = """
from torchvision import tv_tensors


def build_model(args, classes, global_batch, device):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                          nn.Dropout(0.1), nn.Conv2d(8, 2, 1)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr)


class Masks:
    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        self.images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8,
                                    generator=generator)

    def __getitem__(self, index):
        image = tv_tensors.Image(self.images[index])
        return image, tv_tensors.Mask((image[0] > 127).long())

    def __len__(self):
        return len(self.images)


def load_data(args, train_set):
    return Masks(48 if train_set else 12)


def transforms(args, train_set):
    steps = [v2.RandomCrop(24), v2.RandomHorizontalFlip()]
    return v2.Compose(steps if train_set else [v2.CenterCrop(24)])


def loss_and_correct(model, images, masks):
    logits = model(normalize(images))
    losses = F.cross_entropy(logits, masks, reduction="none").mean((1, 2))
    return losses.sum(), (logits.argmax(1) == masks).float().mean((1, 2)).sum()
"""


@pytest.mark.parametrize("script, edits, flags", [
    ("fashionmnist_ddp", THREE_TENSORS, ["--fake-data", "--batch-size", 4]),
    ("cifar10_ddp", [("", MASKS)], ["--fake-data", "--batch-size", 2, "--workers", 0]),
], ids=["three tensors", "masks"])
def test_a_copy_is_resumed_bit_for_bit_on_2_processes(script, edits, flags, tmp_path):
    """12 steps in each of 2 epochs, stopped in the second."""
    copy = make_copy(script, tmp_path / "train.py", *edits)
    flags += ["--epochs", 2, "--lr", 0.01, "--checkpoint"]
    ranks = finish(copy, *flags, tmp_path / "whole", nproc=2, setup=Recorder)
    stop(copy, *flags, tmp_path / "resumed", nproc=2, after=15)
    finish(copy, *flags, tmp_path / "resumed", nproc=2)
    assert_equal(tmp_path / "whole", tmp_path / "resumed")

    batches = [part.batch for recorder in ranks
               for parts in [*recorder.steps, *recorder.evaluations] for part in parts]
    for inputs, targets, *weights in batches:
        expected = (inputs[:, 0] > 127).long() if script == "cifar10_ddp" else (
            inputs[:, :3].argmax(1))
        assert torch.equal(targets, expected), (
            "labels or masks do not belong to their samples: were they transformed apart, or "
            "indexed otherwise?")
        assert all(torch.equal(tensor, inputs[:, 3].abs()) for tensor in weights), (
            "the third tensor does not belong to its samples")


# ---- a second value that is not detached ----
class Count(torch.autograd.Function):
    """The identity. GRAPHS has those of its calls that are not freed."""

    @staticmethod
    def forward(ctx, number):
        GRAPHS.add(ctx)
        return number.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


GRAPHS = weakref.WeakSet()


def add_metric(module, rank):
    """A setup for train(): the metric has a graph. It returns how many there are in each step."""
    counts = []
    use_small_model(module)
    loss_and_correct = module.loss_and_correct

    def with_metric(model, *batch):
        loss, _ = loss_and_correct(model, *batch)
        counts.append(len(GRAPHS))
        return loss, Count.apply(2 * loss)

    module.loss_and_correct = with_metric
    return counts


@pytest.mark.parametrize("script", ["cifar10_ddp", "fashionmnist_ddp"])
def test_the_graph_of_a_metric_is_freed_after_its_step(script):
    (counts,) = finish(script, "--fake-data", 64, "--batch-size", 8, "--epochs", 1, nproc=1,
                       setup=add_metric)
    assert max(counts) == 1, (
        f"a metric that is not detached keeps its graph. Graphs before each step: {counts}")
