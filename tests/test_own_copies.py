"""A copy for one's own model and data is made by replacing functions: see copies.py.

The copies of the pages are in test_readme_code.py.
"""

import pytest
import torch
from checkpoints import assert_equal
from copies import make_copy
from functions import finish, stop, watch
from recorder import Recorder, use_small_model
from scripts import SCRIPTS

# Images, masks and weights in a batch, transformed together; a branch of the model that only
# trains, as GoogLeNet's and a detector's: DDP waits for the gradients of all parameters
MASKS = """
from torchvision import tv_tensors


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                                      nn.Dropout(0.1))
        self.head = nn.Conv2d(8, 2, 1)
        self.auxiliary = nn.Conv2d(8, 2, 1)

    def forward(self, images):
        features = self.features(images)
        if self.training:
            return self.head(features), self.auxiliary(features)
        return self.head(features),


def build_model(args, classes, global_batch, device):
    model = Branches().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr)


class Masks:
    def __init__(self, count):
        self.count = count

    def __getitem__(self, index):
        image = torch.randint(256, (3, 32, 32), generator=torch.Generator().manual_seed(index))
        image[2] = index
        image = tv_tensors.Image(image.to(torch.uint8))
        return image, tv_tensors.Mask((image[0] > 127).long()), index

    def __len__(self):
        return self.count


def load_data(args, train_set):
    return Masks(48 if train_set else 12)


def transforms(args, train_set):
    steps = [v2.RandomCrop(24), v2.RandomHorizontalFlip()]
    return v2.Compose(steps if train_set else [v2.CenterCrop(24)])


def loss_and_correct(model, images, masks, weights):
    logits, *others = model(normalize(images))
    losses = F.cross_entropy(logits, masks, reduction="none")
    for output in others:
        losses = losses + 0.3 * F.cross_entropy(output, masks, reduction="none")
    correct = (logits.argmax(1) == masks).float().mean((1, 2))
    return (weights * losses.mean((1, 2))).sum(), (weights * correct).sum()
"""


def test_a_copy_for_masks_and_weights_is_resumed_bit_for_bit_on_2_processes(tmp_path):
    """12 steps in each of 2 epochs, stopped in the second."""
    copy = make_copy("cifar10_ddp", tmp_path / "train.py", ("", MASKS))
    flags = ["--fake-data", "--batch-size", 2, "--workers", 0, "--epochs", 2, "--lr", 0.01,
             "--checkpoint"]
    ranks = finish(copy, *flags, tmp_path / "whole", nproc=2, setup=Recorder)
    stop(copy, *flags, tmp_path / "resumed", nproc=2, after=15)
    finish(copy, *flags, tmp_path / "resumed", nproc=2)
    assert_equal(tmp_path / "whole", tmp_path / "resumed")

    batches = [part.batch for recorder in ranks
               for parts in [*recorder.steps, *recorder.evaluations] for part in parts]
    for images, masks, weights in batches:
        assert torch.equal(masks, (images[:, 0] > 127).long()), (
            "masks do not belong to their images: were they transformed apart?")
        assert torch.equal(weights, images[:, 2, 0, 0].long()), (
            "the third tensor does not belong to its images")


@pytest.mark.parametrize("script", ["cifar10_ddp", "fashionmnist_ddp"])
def test_loss_and_metric_need_not_be_detached(script):
    """Their graphs would be kept for an epoch."""
    def setup(module, rank):
        graphs = []
        use_small_model(module)
        loss_and_correct = module.loss_and_correct

        def with_metric(model, *batch):
            loss, _ = loss_and_correct(model, *batch)
            return loss, 2 * loss

        module.loss_and_correct = with_metric
        watch(module, "mean_of_all_ranks", lambda sums, count, device: graphs.append(
            [total.requires_grad for total in sums]))
        return graphs

    (graphs,) = finish(script, "--fake-data", 64, "--batch-size", 8, "--epochs", 1,
                       *SCRIPTS[script].no_children, nproc=1, setup=setup)
    assert graphs == 2 * [[False, False]], (
        f"sums of loss and metric that are not detached keep the graphs of all steps: {graphs}")
