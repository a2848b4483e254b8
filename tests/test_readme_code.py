"""Code of the READMEs does what they say.

The comment <!-- test: NAME --> stands before each block.
"""

import re
import subprocess
import sys

import pytest
import torch
from checkpoints import load_checkpoint
from copies import make_copy
from image_folder import CLASSES, write_images
from processes import clean_environment, run
from scripts import ROOT
from torchvision import models
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2


def code_block(folder, name):
    """Return the Python code behind the comment with this name in the README of a folder."""
    text = (ROOT / folder / "README.md").read_text()
    comment = f"<!-- test: {name} -->"
    blocks = re.findall(rf"{re.escape(comment)}\n```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1, f"{folder}/README.md has {len(blocks)} Python blocks after {comment}"
    return blocks[0]


# --- fashionmnist_ddp/README.md: tensors of one's own ---
def write_pairs(path, count, seed):
    """Save inputs (N, 20) and the labels of three classes."""
    inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    torch.save((inputs, inputs[:, :3].argmax(1)), path)


def test_three_edits_make_a_copy_for_tensors(tmp_path):
    names = ("own model", "own data", "own loss")
    blocks = [code_block("fashionmnist_ddp", name) for name in names]
    (tmp_path / "edits.py").write_text("\n\n".join(blocks))
    make_copy("fashionmnist_ddp", tmp_path / "edits.py", ["CNN", "augment"], tmp_path / "my.py")
    write_pairs(tmp_path / "train.pt", 1024, 1)
    write_pairs(tmp_path / "test.pt", 200, 2)
    result = run(tmp_path / "my.py", "--batch-size", 16, "--checkpoint", "my.pt", cwd=tmp_path,
                 launcher="torchrun", nproc=2)
    assert result.status == 0, f"the copy of the README does not run:\n{result.text}"
    assert "of 1024 " in result.text, f"train.pt has 1024 samples:\n{result.text}"
    accuracy = float(re.findall(r"test loss [\d.]+  accuracy ([\d.]+)", result.text)[-1])
    assert accuracy > 0.8, f"the copy of the README does not learn:\n{result.text}"


# --- cifar10_ddp/README.md: the trained weights ---
def classify_by_torchvision(checkpoint, path):
    """Return the logits of an image, without the code of the script."""
    model = models.resnet50(num_classes=2)
    model.load_state_dict(checkpoint["model"])
    image = v2.functional.pil_to_tensor(default_loader(path))
    image = v2.CenterCrop(224)(v2.Resize(256)(image))
    with torch.no_grad():
        return model.eval()((image.unsqueeze(0) - 115.0) / 57.0)[0]


def test_the_weights_classify_an_image(tmp_path):
    """As torchvision's own model does, with the test set's transform."""
    write_images(tmp_path / "DIR", train=2, val=2)
    result = run("cifar10_ddp", "--image-folder", "DIR", "--model", "resnet50", "--batch-size", 2,
                 "--epochs", 1, "--checkpoint", "images.pt", cwd=tmp_path)
    assert result.status == 0, f"the run whose weights are used fails:\n{result.text}"
    image = tmp_path / "DIR/val/dog/1.jpg"
    (tmp_path / "image.jpg").write_bytes(image.read_bytes())

    code = code_block("cifar10_ddp", "use the weights") + "print(*logits[0].tolist())\n"
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                             text=True, env=clean_environment(PYTHONPATH=ROOT))
    assert process.returncode == 0, f"the README's code fails:\n{process.stderr}"
    name, logits = process.stdout.splitlines()
    expected = classify_by_torchvision(load_checkpoint(tmp_path / "images.pt"), image)
    logits = [float(logit) for logit in logits.split()]
    assert logits == pytest.approx(expected.tolist(), abs=1e-3), (
        f"the README's code computes other logits than torchvision's model: {logits}, {expected}")
    assert name == CLASSES[expected.argmax()], f"the README's code prints {name} for {expected}"
