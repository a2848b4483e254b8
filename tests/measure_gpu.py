"""Measure cifar10_ddp on one GPU: a tool, not a test. On a fast GPU it takes some 5 minutes.

    python tests/measure_gpu.py IMAGES.pt

IMAGES.pt holds {"train": (images, labels), "test": ...}, uint8 (N, 3, 32, 32) and int64 (N,). It
prints the samples/s and the validation accuracy of
    one epoch, with 128 images a step;
    two epochs with --compile, with 128 and with 512 images a step;
    30 epochs of a copy of fashionmnist_ddp that holds the images on the GPU.
"""
import inspect
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from copies import make_copy
from scripts import load_script

FILE = Path(sys.argv[1]).resolve()

FROM_FILE = f"""
def prepare_data(args):
    pass


def load_data(args):
    sets = torch.load({str(FILE)!r})
    return sets["train"], sets["test"]
"""
DATA_SETS = FROM_FILE.replace("def load_data(args)", "def load_tensors(args)") + """

def load_data(args):
    args.classes = list("0123456789")
    return [TensorDataset(*tensors) for tensors in load_tensors(args)]
"""
IN_MEMORY = FROM_FILE + """

def build_model(args):
    from torchvision import models
    model = models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def build_optimizer(args, model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True,
                                weight_decay=5e-4, fused=True)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, steps)


def scale(images, labels):
    return images.sub(115).div(57), labels


def loss_and_counts(args, model, images, labels):
    smoothing = 0.1 if model.training else 0.0
    images = images.to(memory_format=torch.channels_last)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=args.bf16):
        logits = model(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    return loss, (logits.argmax(1) == labels).sum()
""" + "\n\n" + inspect.getsource(load_script("cifar10_ddp").augment)


def measure(name, path, *flags):
    """Train, and print the last speed and accuracy, and the seconds of each epoch."""
    command = [sys.executable, path, "--bf16", *map(str, flags)]
    result = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text = result.stdout
    if result.returncode != 0:
        sys.exit(f"{name}: status {result.returncode}\n{text}")
    speeds = re.findall(r"samples/s ([\d,]+)", text)
    accuracies = re.findall(r"val_accuracy ([\d.]+)", text)
    seconds = re.findall(r"seconds ([\d.]+)", text)
    print(f"{name:44} samples/s {speeds[-1:]}  accuracy {accuracies[-1:]}  "
          f"seconds of epochs {seconds[:2]} ... {seconds[-1:]}", flush=True)


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        copy = make_copy("cifar10_ddp", folder / "train.py", (None, DATA_SETS))
        for name, batch, *more in (("128 images", 128, "--epochs", 1),
                                   ("compiled, 128 images", 128, "--epochs", 2, "--compile"),
                                   ("compiled, 512 images", 512, "--epochs", 2, "--compile")):
            measure(name, copy, "--global-batch", batch, "--batch-size", batch, "--log-every", 1,
                    *more)
        copy = make_copy("fashionmnist_ddp", folder / "memory.py", (None, IN_MEMORY))
        for batch in (128, 512):
            measure(f"in memory, {batch} images", copy, "--epochs", 30, "--nproc", 1,
                    "--global-batch", batch, "--lr", 0.2 * batch / 256)


if __name__ == "__main__":
    main()
