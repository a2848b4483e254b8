"""Own data, models, losses and loops are right, or an error line."""

import os
import random
import re
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from checkpoints import assert_equal, load_checkpoint
from copies import make_copy
from forked import train_forked, train_to_end, watch
from launchers import run
from recorder import FewPixels, record_small_model, use_small_model
from scripts import CHECKPOINT_SCRIPTS, SCRIPTS, load_script, script_path
from torch.utils.data import TensorDataset

TEST_SCRIPTS = ["cifar10_ddp", "fashionmnist_ddp"]


def flags_of(script, *more, epochs=4):
    """Return flags for three steps of 24 samples in each epoch, on two processes."""
    return (SCRIPTS[script].data_flag, 72, "--batch-size", 12, "--epochs", epochs, "--lr", 0.1,
            *SCRIPTS[script].no_children, *more)


def assert_error(end, words, mistake):
    """Fail unless each rank ends with an error line that has these words."""
    for status in end.statuses:
        assert "error: " in str(status) and words in status, (
            f"{mistake}: there must be an error line with {words!r}: {end.statuses}\n{end.text}")


def use_data(module, load):
    """Let load() be a copy's load_data. It returns images and labels to train, and those to test.

    In cifar10_ddp, they are data sets, and have classes.
    """
    def load_data(args):
        sets = load()
        if hasattr(module, "transforms"):
            sets = [TensorDataset(*tensors) for tensors in sets]
            for data in sets:
                data.classes = list("0123456789")
        return sets

    module.load_data = load_data


# ---- load_data ----
def draw(count):
    """Return images of noise, and labels that say nothing about them."""
    labels = [random.randrange(10) for _ in range(count)]
    return torch.randint(256, (count, 3, 28, 28), dtype=torch.uint8), torch.tensor(labels)


@pytest.mark.parametrize("script", TEST_SCRIPTS)
def test_data_that_load_data_draws_are_equal_on_all_ranks_and_differ_in_both_sets(script):
    def setup(module, rank):
        sets = []
        random.seed(os.getpid())  # another state in each process, as in a new interpreter
        use_data(module, lambda: sets.append([draw(72), draw(24)]) or sets[0])
        use_small_model(module)
        return sets

    ranks = train_to_end(script, *flags_of(script, epochs=1), nproc=2, setup=setup).results
    calls = [len(sets) for sets in ranks]
    assert calls == [1, 1], f"{script} calls load_data {calls} times on two ranks, not once"
    (training, test), others = ranks[0][0], ranks[1][0]
    for (images, labels), (other_images, other_labels) in zip((training, test), others):
        assert torch.equal(images, other_images), f"{script}: torch draws other images on rank 1"
        assert torch.equal(labels, other_labels), f"{script}: Python draws other labels on rank 1"
    seen = {image.numpy().tobytes() for image in training[0]}
    same = sum(image.numpy().tobytes() in seen for image in test[0])
    assert same == 0, f"{script}: {same} of 24 drawn test samples are training samples"


CLASSES_OF_A_SET = {  # an unsorted set of names: their order differs in each process
    "fashionmnist_ddp": ('before "return fake_images("', """
        names = [f"class {number}" for number in range(10)]
        number_of = {name: number for number, name in enumerate(set(names))}
        labels = torch.tensor([number_of[name] for name in names]).repeat(10)
        images = torch.randint(256, (100, 1, 28, 28), dtype=torch.uint8)
        return (images, labels), (images, labels)"""),
    "cifar10_ddp": ('after "classes = list("', 'classes = list({f"class {name}" for name in classes})'),
}


@pytest.mark.parametrize("script", CLASSES_OF_A_SET)
def test_classes_from_a_set_are_an_error_line(script, tmp_path):
    """Started by torchrun: forked processes have the same seed of hash()."""
    copy = make_copy(script, tmp_path / "train.py", CLASSES_OF_A_SET[script])
    checkpoint = tmp_path / "run.pt"
    flags = flags_of(script, "--checkpoint", checkpoint, epochs=1)
    env = {"PYTHONHASHSEED": "random"}
    status, text = run(copy, *flags, launcher="torchrun", nproc=2, env=env)
    assert status != 0, f"{script}: two ranks have other classes, and the run ends well\n{text}"
    assert re.search("error: the ranks have different data .*sort", text), (
        f"{script}: two ranks have other classes: there is no error line that says so\n{text}")
    assert not checkpoint.exists(), f"{script} has trained with other classes on each rank\n{text}"


@pytest.mark.parametrize("script", TEST_SCRIPTS)
def test_a_resume_with_other_classes_is_refused_and_leaves_the_file(script, tmp_path):
    """As from a set: one process, whose resume has the same classes in another order."""
    path = tmp_path / "run.pt"

    def setup(module, rank):
        order = torch.arange(10) if not path.exists() else torch.arange(9, -1, -1)
        images = torch.randint(256, (72, 3, 28, 28), dtype=torch.uint8)
        labels = order[torch.arange(72) % 10]
        use_data(module, lambda: [(images, labels), (images, labels)])
        load_data = module.load_data

        def load_named(args):
            sets = load_data(args)
            for data in sets:
                if hasattr(data, "classes"):
                    data.classes = [f"class {number}" for number in order.tolist()]
            return sets

        module.load_data = load_named
        use_small_model(module)

    train_to_end(script, *flags_of(script, "--checkpoint", path, epochs=1), setup=setup)
    before = path.read_bytes()
    end = train_forked(script, *flags_of(script, "--checkpoint", path, epochs=2), setup=setup)
    assert_error(end, "the checkpoint is of another run", f"{script} resumes with other classes")
    assert path.read_bytes() == before, f"{script} has overwritten a file of other classes"


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_other_numbers_of_samples_on_two_ranks_are_an_error_line(script, tmp_path):
    def setup(module, rank):
        if rank == 1:
            load_data = module.load_data

            def load_fewer(args):
                first, second = load_data(args)
                if script == "cpu_ddp":
                    return first[:-1], second[:-1]
                if script == "fashionmnist_ddp":
                    return [tensor[:-1] for tensor in first], second
                first.tensors = [tensor[:-1] for tensor in first.tensors]
                return first, second

            module.load_data = load_fewer
        use_small_model(module)

    path = tmp_path / "run.pt"
    end = train_forked(script, *flags_of(script, "--checkpoint", path, epochs=1), nproc=2,
                       setup=setup)
    assert_error(end, "the ranks have different data",
                 f"{script}: rank 1 has a sample less than rank 0")
    assert not path.exists(), f"{script} has trained with a sample less on rank 1"


LABELS = {  # of 4 samples
    "floats": torch.tensor([0.1, 0.2, 0.3, 0.9]),
    "bfloat16": torch.tensor([0.1, 0.2, 0.3, 0.9], dtype=torch.bfloat16),
    "bool": torch.tensor([True, False, True, True]),
    "uint8": torch.tensor([3, 2, 1, 0], dtype=torch.uint8),
    "uint16": torch.tensor([3, 2, 1, 0], dtype=torch.uint16),
    "one-hot": torch.eye(4),
    "masks": torch.arange(4).view(4, 1, 1).repeat(1, 28, 28),
}


@pytest.mark.parametrize("kind", LABELS)
def test_digest_of_labels_tells_another_order(kind):
    digest = load_script("fashionmnist_ddp").digest
    labels = LABELS[kind]
    assert digest(labels) == digest(labels.clone()), f"labels that are {kind}: no digest of them"
    turned = labels[[3, 2, 0, 1]]
    assert digest(turned) != digest(labels), f"labels that are {kind}: another order is not noticed"


def test_digest_of_floats_is_equal_where_they_are_computed_in_another_way():
    """Their last digits differ on another machine, or with other threads."""
    digest = load_script("fashionmnist_ddp").digest
    for name, labels in (("noise", torch.randn(1000)), ("constant", torch.full((1000,), 0.1)),
                         ("images", torch.rand(1000, 28, 28))):
        found = {digest(labels * (1 + rounding * 1e-7)) for rounding in range(-2, 3)}
        assert len(found) == 1, f"labels of floats ({name}): rounding changes their digest: {found}"
