"""Read and compare the checkpoints of the scripts."""

from pathlib import Path

import torch


def load_checkpoint(path):
    """Return the checkpoint at path as a dict, on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def difference(one, other):
    """Return the largest difference between the weights of two checkpoints (paths)."""
    one = load_checkpoint(one)["model"]
    other = load_checkpoint(other)["model"]
    assert one.keys() == other.keys(), f"other layers: {one.keys() ^ other.keys()}"
    differences = [(one[name].double() - other[name].double()).abs().max() for name in one]
    return max(differences).item()


def assert_equal(one, other, place="checkpoint"):
    """Fail unless two checkpoints are equal bit for bit. The message says where they differ.

    They are paths, or parts of what torch.load returns.
    """
    if place == "checkpoint" and isinstance(one, (str, Path)):
        one = load_checkpoint(one)
        other = load_checkpoint(other)
    assert type(one) is type(other), f"{place} is a {type(one)}, and a {type(other)}"
    if isinstance(one, torch.Tensor):
        assert_equal_tensors(one, other, place)
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), f"{place} has {list(one)}, and {list(other)}"
        for key in one:
            assert_equal(one[key], other[key], f"{place}[{key!r}]")
    elif isinstance(one, list):
        assert len(one) == len(other), f"{place} has {len(one)} items, and {len(other)}"
        for index in range(len(one)):
            assert_equal(one[index], other[index], f"{place}[{index}]")
    else:
        assert one == other, f"{place} is {one!r}, and {other!r}"


def assert_equal_tensors(one, other, place):
    assert one.dtype == other.dtype, f"{place} is of {one.dtype}, and of {other.dtype}"
    assert one.shape == other.shape, f"{place} is of {one.shape}, and of {other.shape}"
    if not torch.equal(one, other):
        largest = (one.double() - other.double()).abs().max().item()
        raise AssertionError(f"{place} differs by up to {largest:.3g}")
