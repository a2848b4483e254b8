"""Edits for test_check_copy.py: a small model and others, and the places of edits."""

FLAGS = {"cifar10_ddp": ["--fake-data", "--model", "shufflenet_v2_x0_5", "--image-size", "32"],
         "fashionmnist_ddp": ["--fake-data"]}
SMALL = """
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)

    def features(self, images):
        images = F.adaptive_avg_pool2d(images.mean(1, keepdim=True), 4)
        return self.body(images.flatten(1)).tanh()

    def forward(self, images):
        return self.head(self.features(images))


def build_model(args):
    return Small()


def build_optimizer(args, model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer)


def loss_and_counts(args, model, images, labels):
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    counts = (logits.argmax(1) == labels).sum()
    return loss, counts
"""
SAVED = 'before "progress = {"'
RESUMED = 'after "    resume(checkpoint, run, saved, progress)"'
EVALUATED = 'after "results.update(val_results"'
EVALUATION = 'instead of "val_results = evaluate("'
LOSS_CALL = 'instead of "loss, counts = loss_and_counts(args, ddp_model, *batch)"'
# The script's own comparison of the ranks' weights comes first
NO_GUARD = ('instead of "        check_model(model)"', "pass")


def above(code):
    return "", code


def in_loss(code, above=""):
    """Return the edit that computes something more before the small model's loss is returned."""
    function = SMALL[SMALL.index("def loss_and_counts"):]
    code = "".join(f"    {line}\n" for line in code.splitlines())
    return "", above + function.replace("    return loss", code + "    return loss")


def model(code):
    """Return the edit that changes the small model after it is built."""
    lines = "".join(f"    {line}\n" for line in code.splitlines())
    return "", f"def build_model(args):\n    model = Small()\n{lines}    return model\n"


SCENES = """
class Scenes(Dataset):
    def __init__(self, count, seed):
        self.file = None
        self.count = count
        self.seed = seed

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.file = self.file or open("rows", "rb")  # as an archive: a handle in each process
        self.file.seek(index)
        generator = torch.Generator().manual_seed(1000 * self.seed + self.file.read(1)[0])
        size = 24 + 8 * int(torch.randint(3, (), generator=generator))
        boxes = torch.rand(index % 3 + 1, 4, generator=generator) * size
        return torch.rand(3, size, size, generator=generator), {"boxes": boxes}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.box = nn.Linear(8, 4)

    def forward(self, images, targets=None):
        pooled = torch.stack([self.body(image[None])[0].mean((1, 2)) for image in images])
        boxes = self.box(self.norm(pooled))
        if not self.training:
            return [{"boxes": box[None]} for box in boxes]
        wanted = torch.stack([target["boxes"].mean(0) for target in targets])
        return {"box": (boxes - wanted).abs().mean(), "size": boxes.square().mean()}


def build_model(args):
    return Detector()


def load_data(args):
    args.classes = ["background", "square"]
    return Scenes(100, 1), Scenes(30, 2)


def default_collate(samples):
    return tuple(zip(*samples))


def scale(images, targets):
    return images, targets


def augment(args, images, targets):
    return [image * torch.rand(()) for image in images], targets


def loss_and_counts(args, model, images, targets):
    if model.training:
        return sum(model(images, targets).values()), torch.zeros(())
    errors = [(output["boxes"] - target["boxes"]).abs().mean()
              for output, target in zip(model(images), targets)]
    return torch.zeros(()), torch.stack(errors).sum()
"""
VAE = """
class Noisy(torch.utils.data.Dataset):
    def __init__(self, count, noise):
        self.inputs, self.noise = torch.rand(count, 10), noise

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + self.noise * random.random() * torch.rand(10), index


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(10, 8)
        self.decoder = nn.Linear(4, 10)

    def forward(self, inputs):
        mean, logs = self.encoder(inputs).chunk(2, 1)
        sample = mean + torch.randn_like(mean) * logs.exp()
        return self.decoder(sample), mean.square() + (2 * logs).exp() - 1 - 2 * logs


def load_data(args):
    return Noisy(100, noise=0.1), Noisy(30, noise=0.0)


def build_model(args):
    return VAE()


def loss_and_counts(args, model, inputs, indices):
    outputs, divergence = model(inputs)
    error = (outputs - inputs).square().sum() + divergence.sum() / 2
    return error / len(inputs), indices.sum()
"""
GAN = """
class Maker(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 784))

    def forward(self, noise):
        return self.net(noise).sigmoid()


def build_model(args):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 1))


def wrong(logits, wanted):
    return F.binary_cross_entropy_with_logits(logits, wanted.expand_as(logits))


def loss_and_counts(args, model, images, labels):
    logits = model(images)
    return wrong(logits, torch.ones(1)), (logits > 0).sum()


def train_epoch(args, ddp_model, optimizer, scheduler, batches):
    sums = Sums(args)
    model = getattr(ddp_model, "module", ddp_model)
    for real, _ in batches:
        noise = torch.randn(len(real), 8)
        optimizer.zero_grad()
        logits = ddp_model(torch.cat([real.flatten(1) / 255, args.maker(noise).detach()]))
        loss = wrong(logits, (torch.arange(len(logits)) < len(real)).float()[:, None])
        loss.backward()
        optimizer.step()
        args.maker_optimizer.zero_grad()
        model.requires_grad_(False)
        wrong(model(args.maker(noise)), torch.ones(1)).backward()
        model.requires_grad_(True)
        args.maker_optimizer.step()
        sums.add(loss, (logits[:len(real)] > 0).sum(), len(real))
    return sums.results()
"""
HELPER = """
from pathlib import Path

import torch


class Mapped(torch.utils.data.Dataset):
    def __init__(self, items, function=None):
        self.items, self.function = items, function

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.function(*self.items[index]) if self.function else self.items[index]

    def map(self, function):
        return Mapped(self.items, function)


def write(text):
    (Path(__file__).resolve().parent / "results.txt").write_text(text)
"""
