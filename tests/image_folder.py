"""Write small folders of images."""

import torch
from torchvision.transforms.v2.functional import to_pil_image


def write_images(folder, train=12, val=5):
    """Write so many random images of each part, of two classes in turn. Return the folder."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", train), ("val", val)):
        for number in range(count):
            path = folder / part / ("cat", "dog")[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = torch.randint(256, (3, 40, 40), generator=generator, dtype=torch.uint8)
            to_pil_image(pixels).save(path)
    return folder
