"""cifar10_ddp trains any classifier of torchvision: here, one of each kind."""

import pytest
import torch
from forked import fork
from scripts import load_script
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["resnet18", "inception_v3", "squeezenet1_0", "efficientnet_b0",
                                  "convnext_tiny", "swin_v2_t", "vit_b_16"])
def test_a_step_gives_all_ranks_the_same_gradients(name):
    module = load_script("cifar10_ddp")
    size, default = (32, 32) if name == "resnet18" else (96, 224)
    found = module.parse_args(["--model", name]).image_size
    assert found == default, f"{name}: images of {found} pixels by default, not {default}"
    args = module.parse_args(["--model", name, "--image-size", str(size)])
    torch.manual_seed(0)
    model = module.build_model(args, 10)

    def step(rank):
        module.form_group(rank, 2, CPU, 60)
        images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)  # others on each rank
        images = torch.stack([module.transforms(args, True)(image, 0)[0] for image in images])
        assert images.shape == (2, 3, size, size), f"--image-size {size}: {images.shape}"
        ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        module.loss_and_correct(ddp_model, images, torch.tensor([3, rank]))[0].backward()
        return [None if parameter.grad is None else parameter.grad.double().sum().item()
                for parameter in model.parameters()]

    first, second = fork(2, step)
    assert None not in first, "a parameter has no gradient: DDP waits for it in the next step"
    assert first == second, "the gradients of the two ranks differ"
