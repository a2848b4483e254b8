"""An ordinary edit of a copy does not go wrong without a word."""

import ast

import pytest
import torch
import torch.nn as nn
from checkpoints import assert_equal, load_checkpoint
from copies import make_copy
from forked import train_forked, train_to_end, train_until, watch
from recorder import Recorder, change_sets, use_small_model
from scripts import CHECKPOINT_SCRIPTS, SCRIPTS, script_path

TEST_SCRIPTS = ["cifar10_ddp", "fashionmnist_ddp"]
WORKERS = {"cifar10_ddp": ("--workers", 1)}


def flags_of(script, *more):
    """Return flags for three steps of 24 samples in each of 4 epochs, on two processes."""
    return (SCRIPTS[script].data_flag, 72, "--batch-size", 12, "--epochs", 4, "--lr", 0.1, *more)


# ---- evaluations ----
def edit_evaluation(script, path, kind):
    """Write a copy that evaluates in another way, to path."""
    (call,) = (node for node in ast.walk(ast.parse(script_path(script).read_text()))
               if isinstance(node, ast.Assign) and "evaluate(" in ast.unparse(node.value))
    results, batches = ast.unparse(call.targets[0]), ast.unparse(call.value.args[1])
    line = ast.unparse(call)
    skip = f"{results} = 0.0, 0.0"
    code = {"every second epoch": f"{skip}\nif epoch % 2:\n    {line}",
            "twice": f"{line}\n{line}",
            "never": skip,
            "with one batch": line.replace(batches, f"[next(iter({batches}))]")}[kind]
    return make_copy(script, path, ('instead of "= evaluate("', code))


@pytest.fixture(scope="module")
def unedited(tmp_path_factory):
    """The checkpoints of the scripts as they are."""
    folder = tmp_path_factory.mktemp("unedited")
    for script in TEST_SCRIPTS:
        train_to_end(script, *flags_of(script, *WORKERS.get(script, ())), "--checkpoint",
                     folder / script, nproc=2, setup=use_small_model)
    return folder


@pytest.mark.parametrize("kind", ["every second epoch", "twice", "never", "with one batch"])
@pytest.mark.parametrize("script", TEST_SCRIPTS)
def test_a_copy_that_evaluates_in_another_way_trains_on_the_same_samples(script, kind, unedited,
                                                                        tmp_path):
    """It is stopped in its second epoch, too, and resumed."""
    copy = edit_evaluation(script, tmp_path / "train.py", kind)
    flags = flags_of(script, *WORKERS.get(script, ()), "--checkpoint")
    train_to_end(copy, *flags, tmp_path / "whole", nproc=2, setup=use_small_model)
    assert_equal(tmp_path / "whole", unedited / script, f"{script} evaluates {kind}: checkpoint")
    train_until(copy, *flags, tmp_path / "parts", nproc=2, after=5, setup=use_small_model)
    train_to_end(copy, *flags, tmp_path / "parts", nproc=2, setup=use_small_model)
    assert_equal(tmp_path / "parts", unedited / script, f"{script}, {kind}, resumed: checkpoint")


# ---- weights ----
def call_ddps_module(module, rank):
    """DDP does not see it, and exchanges nothing."""
    name = "loss_of" if hasattr(module, "loss_of") else "loss_and_correct"
    loss_function = getattr(module, name)
    setattr(module, name, lambda model, *batch: loss_function(
        getattr(model, "module", model), *batch))


def change_the_last_rank(module, rank):
    """A little: its weights are nearer to the mean of all than it is itself."""
    watch(module, "check_weights", lambda saved: next(saved["model"].parameters()).data.mul_(
        1.0004 if rank == 3 else 1))


def train_a_second_model_alone(module, rank):
    """It is in saved, and no DDP exchanges its gradients."""
    restore = module.restore

    def restore_two(checkpoint, settings, saved):
        critic = saved["critic"] = nn.Linear(1, 1)
        watch(module, "check_weights", lambda _: critic.weight.data.add_(0.1 * rank))
        return restore(checkpoint, settings, saved)

    module.restore = restore_two


@pytest.mark.parametrize("mistake, weight", [
    (call_ddps_module, "model."), (change_the_last_rank, "model."),
    (train_a_second_model_alone, "critic.weight")])
@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_gradients_that_are_not_exchanged_are_an_error(script, mistake, weight, tmp_path):
    """All ranks notice it before rank 0 saves."""
    def setup(module, rank):
        use_small_model(module)
        mistake(module, rank)

    flags = flags_of(script, *SCRIPTS[script].no_children, "--checkpoint", tmp_path / "run.pt")
    end = train_forked(script, *flags, nproc=4, setup=setup)
    for status in end.statuses:
        assert f"error: {weight}" in str(status), (
            f"{script}: the ranks have other weights {weight}: it ends with {end.statuses}\n"
            f"{end.text}")
    assert not (tmp_path / "run.pt").exists(), f"{script} has saved rank 0's weights\n{end.text}"


# ---- what is saved ----
AVERAGE = [
    ('before "saved = {"', """
     from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
     average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))"""),
    ('after "saved = {"', 'saved["average"] = average'),
    ('after "optimizer.step()"', "average.update_parameters(model)"),
]


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_an_average_of_the_weights_is_saved_and_resumed(script, tmp_path):
    copy = make_copy(script, tmp_path / "train.py", *AVERAGE)
    flags = flags_of(script, *SCRIPTS[script].no_children, "--checkpoint")
    train_to_end(copy, *flags, tmp_path / "whole", nproc=2, setup=use_small_model)
    train_until(copy, *flags, tmp_path / "parts", nproc=2, after=5, setup=use_small_model)
    train_to_end(copy, *flags, tmp_path / "parts", nproc=2, setup=use_small_model)
    saved = load_checkpoint(tmp_path / "whole")
    assert "average" in saved, f"the checkpoint has no average, only {list(saved)}"
    assert_equal(tmp_path / "parts", tmp_path / "whole")


# ---- data ----
class Name(str):
    """Plain for its users, and not for torch.load: as numpy.unique returns them."""


def test_class_names_need_not_be_plain_strings(tmp_path):
    def name_classes(data, train_set):
        data.classes = tuple(map(Name, "0123456789"))
        return data

    def setup(module, rank):
        use_small_model(module)
        change_sets(module, name_classes)

    flags = flags_of("cifar10_ddp", "--workers", 0, "--checkpoint", tmp_path / "run.pt")
    for _ in ("the first start", "a resume"):
        train_to_end("cifar10_ddp", *flags, setup=setup)


# ---- model, loss ----
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


def load_data(args):
    sets = Samples(), Samples()
    for index in range(60):
        image = torch.randint(256, (3, 32, 32), dtype=torch.uint8)
        image[2] = index
        mask = tv_tensors.Mask((image[0] > 127).long())
        sets[index >= 48].append((tv_tensors.Image(image), mask, index))
    return sets


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
        watch(module, "mean_of_all_ranks", lambda sums, *_: graphs.append(
            [total.requires_grad for total in sums]))
        return graphs

    (graphs,) = train_to_end(script, "--fake-data", 64, "--batch-size", 8, "--epochs", 1,
                             *SCRIPTS[script].no_children, setup=setup).results
    assert graphs == 2 * [[False, False]], (
        f"sums of loss and metric that are not detached keep the graphs of all steps: {graphs}")
