"""Read and compare the checkpoints of the scripts."""

from pathlib import Path

import torch


def load_checkpoint(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def difference(one, other):
    """The largest difference between the weights of two checkpoints (paths)."""
    one, other = (load_checkpoint(path)["model"] for path in (one, other))
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def assert_equal(one, other, place="checkpoint"):
    """The two checkpoints (paths, or parts of what torch.load returns) are equal bit for bit."""
    if place == "checkpoint" and isinstance(one, (str, Path)):
        one, other = load_checkpoint(one), load_checkpoint(other)
    assert type(one) is type(other), place
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), place
    elif isinstance(one, (dict, list)):
        assert len(one) == len(other), place
        for key in one if isinstance(one, dict) else range(len(one)):
            assert_equal(one[key], other[key], f"{place}[{key!r}]")
    else:
        assert one == other, place
