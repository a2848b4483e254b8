"""cifar10_ddp trains any classifier of torchvision: one of each kind makes a step on 2 processes.

The kinds: a stem of our own and BatchNorm; auxiliary classifiers, which are left out; no BatchNorm
and a convolution as the last layer; dropped blocks and squeeze-and-excitation; layer scales; the
model of the tutorial, with integer buffers; a class token and a fixed image size.
"""

import pytest
import torch
from functions import fork, load_script
from torchvision.transforms import v2

CLASSIFIERS = ("resnet18", "inception_v3", "squeezenet1_0", "efficientnet_b0", "convnext_tiny",
               "swin_v2_t", "vit_b_16")


def step_of(name):
    """Return what rank 0 and rank 1 have seen in the first step of a classifier, as two dicts."""
    module = load_script("cifar10_ddp")
    args = module.parse_args(["--model", name])
    cpu = torch.device("cpu")
    torch.manual_seed(0)
    model, _ = module.build_model(args, 10, 4, cpu)

    def step(rank):
        module.init_process(rank, 2, cpu, 60)
        images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)  # others on each rank
        images = torch.stack([module.transforms(args, True)(image) for image in images])
        labels = torch.tensor([3, rank])
        before = {key: value.clone() for key, value in model.state_dict().items()}
        random_state = torch.get_rng_state()
        ddp_model = module.wrap_ddp(
            model, lambda model: module.loss_and_correct(model, images, labels)[0])
        seen = {
            "changed": [key for key, value in model.state_dict().items()
                        if not torch.equal(value, before[key])],
            "gradients left": [key for key, parameter in model.named_parameters()
                               if parameter.grad is not None],
            "random numbers drawn": not torch.equal(torch.get_rng_state(), random_state),
            "training": all(part.training for part in model.modules()),
        }
        module.loss_and_correct(ddp_model, images, labels)[0].backward()
        seen["no gradient"] = [key for key, parameter in model.named_parameters()
                               if parameter.grad is None or not parameter.grad.isfinite().all()]
        seen["gradients"] = [parameter.grad.double().sum().item()
                             for parameter in model.parameters()]
        return seen

    return fork(2, step)


@pytest.fixture(scope="module", params=CLASSIFIERS)
def seen(request):
    return step_of(request.param)


def test_wrap_ddp_changes_nothing(seen):
    """Its first pass, in evaluation mode, leaves weights, buffers and random numbers alone."""
    for rank in (0, 1):
        changed = seen[rank]["changed"]
        assert not changed, f"wrap_ddp changes weights or buffers of rank {rank}: {changed}"
        left = seen[rank]["gradients left"]
        assert not left, f"wrap_ddp leaves gradients on rank {rank}, which are accumulated: {left}"
        assert not seen[rank]["random numbers drawn"], f"wrap_ddp draws numbers on rank {rank}"
        assert seen[rank]["training"], f"wrap_ddp leaves evaluation mode on rank {rank}"


def test_a_step_gives_all_ranks_the_same_gradients(seen):
    missing = seen[0]["no gradient"]
    assert not missing, f"these parameters have no finite gradient after a step: {missing}"
    first, second = seen[0]["gradients"], seen[1]["gradients"]
    different = sum(one != other for one, other in zip(first, second))
    assert different == 0, f"{different} of {len(first)} gradients differ between the two ranks"
    assert any(first), "all gradients are zero"


def test_biases_and_norms_have_no_weight_decay():
    module = load_script("cifar10_ddp")
    model, optimizer = module.build_model(module.parse_args([]), 10, 128, torch.device("cpu"))
    decays = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            decays[parameter] = group["weight_decay"]
    wrong = [name for name, parameter in model.named_parameters()
             if decays[parameter] != (5e-4 if parameter.ndim > 1 else 0)]
    assert not wrong, f"weights decay by 5e-4, biases and norms do not; these are wrong: {wrong}"


def test_images_are_upsampled_for_the_model():
    """--image-size, or what torchvision's classifiers take; 32 for resnet18."""
    module = load_script("cifar10_ddp")
    image = v2.functional.to_pil_image(torch.zeros(3, 32, 32, dtype=torch.uint8))
    for flags, size in (((), 32), (("--model", "vit_b_16"), 224), (("--image-size", "48"), 48)):
        for train_set in (True, False):
            transformed = module.transforms(module.parse_args(flags), train_set)(image)
            assert transformed.shape == (3, size, size), (
                f"images of {size} pixels for the flags {flags}, not {tuple(transformed.shape)}")
