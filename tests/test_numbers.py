"""What the scripts print is what they did, recomputed; recipes, settings, threads and downloads by their effects."""

import argparse
import io
import os
import re
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from helpers import SCRIPTS, fork, load_script, train

GENERATED = ("cpu_ddp", "synthetic_ddp")
NUMBERS = re.compile(r"step (\d+)/25  loss ([\d.]+)  (?:accuracy ([\d.]+)  )?(\d+) \w+/s  (\S+) left\n")


def small_model(name):
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(512, 10)), 32


@pytest.mark.parametrize("script", SCRIPTS)
def test_printed_numbers(script, tmp_path, capfd):
    """A step takes 1 s on rank 0 and 3 s on rank 1. Five epochs of five steps of 32 samples; 4 samples are left."""
    nproc = 1 if script == "mnist_dp" else 2
    smoothing = 0.1 if script == "fashionmnist_ddp" else 0

    def setup(module, rank):
        steps, saved, threads = [], {}, []  # [loss, correct, samples] of each step; images right when saved
        seconds = 2 if nproc == 1 else 1 + 2 * rank
        module.time = argparse.Namespace(perf_counter=lambda: seconds * len(steps), sleep=time.sleep)
        module.open, module.build_model = lambda *_: io.StringIO(), small_model  # no quota
        os.environ.pop("OMP_NUM_THREADS")
        os.environ["LOCAL_WORLD_SIZE"] = str(nproc)
        os.sched_getaffinity, torch.set_num_threads = lambda _: range(6), threads.append
        cross_entropy, mse_loss = F.cross_entropy, F.mse_loss

        def watch_cross_entropy(logits, y, **how):
            logs, place = logits.detach().double().log_softmax(1), torch.arange(len(y))
            loss = (1 - smoothing) * logs[place, y] + smoothing * logs.mean(1)
            steps.append([-loss.sum().item(), sum(a == b for a, b in zip(logs.argmax(1).tolist(), y.tolist())), len(y)])
            return cross_entropy(logits, y, **how)

        def watch_mse(output, y, **how):
            steps.append([(output.detach() - y).double().square().sum().item(), 0, len(y)])
            return mse_loss(output, y, **how)

        def save_checkpoint(path, state, step, **numbers):
            args, saved[step] = module.parse_args(), None
            if script != "cpu_ddp":
                x, y = (module.generate_data(args.samples, args.seed, train_set=False) if script in GENERATED else
                        module.load_data(args, train_set=False))
                x = module.preprocess(*(x, 32)[:1 + (script == "cifar10_ddp")]) if script not in GENERATED else x
                with torch.no_grad():
                    saved[step] = (state["model"].eval()(x).argmax(1) == y).sum().item(), len(y)
                state["model"].train()

        F.cross_entropy, F.mse_loss, module.save_checkpoint = watch_cross_entropy, watch_mse, save_checkpoint
        return steps, saved, threads

    ranks = train(script, "--epochs", 5, "--batch-size", 32 // nproc, "--samples" if script in GENERATED else
                  "--fake-data", 164, "--lr", 0.01, "--save-every", 2, "--log-every", 4, "--checkpoint", tmp_path / "run",
                  nproc=nproc, setup=setup)
    assert all(code == 0 and threads == [6 // nproc] for (_, _, threads), code, _ in ranks)
    steps = [[sum(column) for column in zip(*parts)] for parts in zip(*(rank[0][0] for rank in ranks))]
    text, saved, logged = capfd.readouterr().out, ranks[0][0][1], []
    for step, loss, accuracy, speed, left in NUMBERS.findall(text):
        logged.append(int(step))
        total, correct, count = map(sum, zip(*steps[(logged[-1] - 1) // 5 * 5:logged[-1]]))  # of its epoch
        assert float(loss) == pytest.approx(total / count, abs=2e-4) and speed == "16"
        assert script == "cpu_ddp" or float(accuracy) == pytest.approx(correct / count, abs=1e-4)
        assert left == str(timedelta(seconds=2 * (25 - logged[-1])))
    assert len(steps) == 25 and {*range(5, 26, 5)} < {*logged}
    assert max(b - a for a, b in zip(logged, logged[1:])) == 2
    assert list(saved) == [10, 20, 25] and not any(rank[0][1] for rank in ranks[1:])
    for step, right in saved.items():
        line = re.search(rf"epoch {step // 5}/5  test accuracy ([\d.]+) \((\d+)/(\d+)\)", text)
        assert right is None or right == (int(line[2]), int(line[3])) and right[1] == 41, (right, line)
        assert right is None or float(line[1]) == pytest.approx(right[0] / 41, abs=1e-4)


# --- recipes ---
def test_recipe_of_cifar10():
    """Without gradients, weights shrink by weight decay, with Nesterov's momentum, at the rate of each step."""
    def setup(module, rank):
        weights, model, cross_entropy = [], nn.Sequential(nn.Flatten(), nn.Linear(3072, 10, bias=False)), F.cross_entropy
        module.build_model, module.preprocess = lambda name: (model, 32), lambda images, size: torch.zeros(len(images), 3072)
        F.cross_entropy = lambda *inputs, **how: (weights.append(model[1].weight[0, 0].item()),
                                                  cross_entropy(*inputs, **how))[1]
        return weights

    ranks = train("cifar10_ddp", "--lr", 6400, "--batch-size", 4, "--epochs", 5, "--fake-data", 16, nproc=2, setup=setup)
    for weights, *_ in ranks:
        weight, momentum = weights[0], 0
        for step in range(10):
            assert weights[step] == pytest.approx(weight, rel=1e-4)
            momentum = 0.9 * momentum + 5e-4 * weight
            weight -= 200 * min((step + 1) / 2, (10 - step) / 8) * (5e-4 * weight + 0.9 * momentum)  # 6400 * 8 / 256
