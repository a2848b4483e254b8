#!/usr/bin/env python3
"""What saving costs: the seconds of one snapshot of fashionmnist_ddp, beside those of an epoch on 2 workers.

    python tests/benchmark_saving.py                  # 60,000 generated images: as many as Fashion-MNIST has
"""

import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from helpers import load_script, run


def main(images=60000):
    script = load_script("fashionmnist_ddp")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        last = Path(folder) / "last"
        result = run("fashionmnist_ddp", "--nproc", 2, "--fake-data", images, "--epochs", 1, "--checkpoint", last, timeout=600)
        if result.status:
            sys.exit(result.stderr)
        epoch = float(re.search(r"epoch 1/1 .*  ([\d.]+) s ", result.stdout)[1])
        state = torch.load(last, weights_only=True)
        model = script.CNN()
        optimizer = torch.optim.Adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        script.restore(state, parts)
        seconds = []
        for step in range(20):
            start = time.perf_counter()
            script.save_snapshot(str(last), step, state["run"], parts)
            seconds.append(time.perf_counter() - start)
        size = last.stat().st_size
    cost = statistics.median(seconds)
    print(f"an epoch of {images} images on 2 workers: {epoch:.1f} s; a snapshot of {size / 1e6:.1f} MB: median {1000 * cost:.0f} ms, "
          f"slowest of {len(seconds)} {1000 * max(seconds):.0f} ms: {100 * cost / epoch:.2f} % with --save-every 1")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
