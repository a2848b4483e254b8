"""A copy for one's own model and data is made by replacing functions."""

import pytest
import torch
from checkpoints import assert_equal
from copies import make_copy
from forked import train_to_end, train_until, watch
from recorder import Recorder, use_small_model
from scripts import SCRIPTS

# Images, masks and weights in a batch, transformed together; a branch of the model that only
# trains, as GoogLeNet's and a detector's: DDP waits for the gradients of all parameters
MASKS = """
from torchvision import tv_tensors


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(3, 2, 3, padding=1)
        self.auxiliary = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, images):
        heads = [self.head, self.auxiliary] if self.training else [self.head]
        return tuple(head(images) for head in heads)


def build_model(args, classes):
    return Branches()


def build_optimizer(args, model, global_batch):
    return torch.optim.AdamW(model.parameters(), lr=args.lr)


class Samples(list):
    classes = ["below", "above"]


def load_data(args, train_set):
    samples = Samples()
    torch.manual_seed(0)
    for index in range(48 if train_set else 12):
        image = torch.randint(256, (3, 32, 32), dtype=torch.uint8)
        image[2] = index
        mask = tv_tensors.Mask((image[0] > 127).long())
        samples.append((tv_tensors.Image(image), mask, index))
    return samples


def transforms(args, train_set):
    steps = [v2.RandomCrop(24), v2.RandomHorizontalFlip()]
    return v2.Compose(steps if train_set else [v2.CenterCrop(24)])


def loss_and_correct(model, images, masks, weights):
    outputs = model(normalize(images))
    logits = outputs[0]
    losses = sum(F.cross_entropy(output, masks, reduction="none") for output in outputs)
    correct = (logits.argmax(1) == masks).float().mean((1, 2))
    return (weights * losses.mean((1, 2))).sum(), (weights * correct).sum()
"""


def test_a_copy_for_masks_and_weights_is_resumed_bit_for_bit_on_2_processes(tmp_path):
    """12 steps in each of 2 epochs, stopped in the second."""
    copy = make_copy("cifar10_ddp", tmp_path / "train.py", ("", MASKS))
    flags = ["--fake-data", "--batch-size", 2, "--workers", 0, "--epochs", 2, "--lr", 0.01,
             "--checkpoint"]
    ranks = train_to_end(copy, *flags, tmp_path / "whole", nproc=2, setup=Recorder).results
    train_until(copy, *flags, tmp_path / "resumed", nproc=2, after=15)
    train_to_end(copy, *flags, tmp_path / "resumed", nproc=2)
    assert_equal(tmp_path / "whole", tmp_path / "resumed")

    for images, masks, weights in [part.batch for parts in ranks[0].steps for part in parts]:
        assert torch.equal(masks, (images[:, 0] > 127).long()), "masks are transformed apart"
        assert torch.equal(weights, images[:, 2, 0, 0].long()), "weights are of other images"


@pytest.mark.parametrize("script", ["cifar10_ddp", "fashionmnist_ddp"])
def test_loss_and_metric_need_not_be_detached(script):
    """Their graphs would be kept for an epoch."""
    def setup(module, rank):
        graphs = []
        use_small_model(module)
        loss_and_correct = module.loss_and_correct
        module.loss_and_correct = lambda *batch: 2 * loss_and_correct(*batch)[:1]  # the loss, twice
        watch(module, "mean_of_all_ranks", lambda sums, count, device: graphs.append(
            [total.requires_grad for total in sums]))
        return graphs

    (graphs,) = train_to_end(script, "--fake-data", 64, "--batch-size", 8, "--epochs", 1,
                             *SCRIPTS[script].no_children, setup=setup).results
    assert graphs == 2 * [[False, False]], (
        f"sums of loss and metric that are not detached keep the graphs of all steps: {graphs}")
