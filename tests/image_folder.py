"""Write small folders of images."""

import torch
from torchvision.transforms.v2.functional import to_pil_image

CLASSES = ["cat", "dog"]


def write_images(folder, train=12, val=5):
    """Write so many images of each part, of the classes in turn, and return the folder."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", train), ("val", val)):
        for number in range(count):
            label = number % len(CLASSES)
            image = torch.randint(40, (3, 40, 40), generator=generator)
            image[1] += 200 * label
            image[2] += 15 * number
            suffix = "png" if number % 4 == 0 else "jpg"
            path = folder / part / CLASSES[label] / f"{number}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            to_pil_image(image.to(torch.uint8)).save(path)
    return folder
