"""cifar10_ddp trains any classifier of torchvision: one of each kind makes a step on 2 processes.

The kinds: a stem of our own and BatchNorm; auxiliary classifiers, which are left out; no BatchNorm
and a convolution as the last layer; dropped blocks and squeeze-and-excitation; layer scales; the
model of the tutorial, with integer buffers; a class token and a fixed image size.
"""

import pytest
import torch
from functions import fork, load_script
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["resnet18", "inception_v3", "squeezenet1_0", "efficientnet_b0",
                                  "convnext_tiny", "swin_v2_t", "vit_b_16"])
def test_a_step_gives_all_ranks_the_same_gradients(name):
    module = load_script("cifar10_ddp")
    size = 32 if name == "resnet18" else 96
    args = module.parse_args(["--model", name, "--image-size", str(size)])
    torch.manual_seed(0)
    model, _ = module.build_model(args, 10, 4, CPU)

    def step(rank):
        module.init_process_group(rank, 2, CPU, 60)
        images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)  # others on each rank
        images = torch.stack([module.transforms(args, True)(image) for image in images])
        assert images.shape == (2, 3, size, size), f"--image-size {size}: {images.shape}"
        ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        module.loss_and_correct(ddp_model, images, torch.tensor([3, rank]))[0].backward()
        return [None if parameter.grad is None else parameter.grad.double().sum().item()
                for parameter in model.parameters()]

    first, second = fork(2, step)
    assert None not in first, "a parameter has no gradient: DDP waits for it in the next step"
    assert torch.tensor(first).isfinite().all(), f"gradients are not finite: {first}"
    assert first == second, "the gradients of the two ranks differ"


@pytest.mark.parametrize("flags, size", [([], 32), (["--model", "vit_b_16"], 224)])
def test_images_are_resized_to_what_classifiers_of_torchvision_take(flags, size):
    """But 32 pixels for resnet18."""
    module = load_script("cifar10_ddp")
    for train_set in (True, False):
        image = torch.zeros(3, 32, 32, dtype=torch.uint8)
        transformed = module.transforms(module.parse_args(flags), train_set)(image)
        assert transformed.shape == (3, size, size), (
            f"images of {size} pixels for the flags {flags}, not {tuple(transformed.shape)}")
