"""Read and compare the checkpoints of the scripts."""

from pathlib import Path

import torch


def load_checkpoint(path):
    """Return the checkpoint at path as a dict, on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def progress(path):
    """Return the place that a checkpoint was saved at: its epoch, or its step."""
    saved = load_checkpoint(path)["progress"]
    return saved["epoch"] if "epoch" in saved else saved["step"]


def difference(one, other):
    """Return the largest difference between the weights of two checkpoints (paths).

    BatchNorm's statistics are not compared: they are those of rank 0's samples.
    """
    one, other = load_checkpoint(one)["model"], load_checkpoint(other)["model"]
    assert one.keys() == other.keys(), f"other layers: {one.keys() ^ other.keys()}"
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one
               if "running_" not in name and "num_batches_tracked" not in name)


def assert_equal(one, other, place="checkpoint"):
    """Fail unless two checkpoints (paths, or parts of their content) are equal bit for bit."""
    if isinstance(one, Path):
        one, other = load_checkpoint(one), load_checkpoint(other)
    assert type(one) is type(other), f"{place} is a {type(one)}, and a {type(other)}"
    if isinstance(one, (dict, list)):
        keys, other_keys = (list(value) if isinstance(value, dict) else list(range(len(value)))
                            for value in (one, other))
        assert keys == other_keys, f"{place} has {keys}, and {other_keys}"
        for key in keys:
            assert_equal(one[key], other[key], f"{place}[{key!r}]")
    elif isinstance(one, torch.Tensor):
        assert one.shape == other.shape, f"{place} is of {one.shape}, and of {other.shape}"
        largest = (one.double() - other.double()).abs().max().item()
        assert torch.equal(one, other), f"{place} differs by up to {largest:.3g}"
    else:
        assert one == other, f"{place} is {one!r}, and {other!r}"
