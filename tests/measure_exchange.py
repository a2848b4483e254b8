# SPDX-License-Identifier: MIT-0
r"""Measure how long the processes take to average gradients: the communication overhead of DDP.

    python tests/measure_exchange.py --model resnet50         # one GPU, or the CPU
    torchrun --standalone --nproc-per-node=4 tests/measure_exchange.py --model resnet50
    srun --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 torchrun --nnodes=2 --nproc-per-node=4 \
        --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 tests/measure_exchange.py

It times training steps of a classifier of torchvision on random images, with and without the
exchange of gradients, in turn. The overhead is the part of a step that the exchange adds.
"""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from scripts import load_script
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision import models

script = load_script("synthetic_ddp")


def parse_args(flags=None):
    """Return the settings of these flags (strings), or of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="resnet50", choices=models.list_models(module=models),
                        metavar="NAME", help="a classifier of torchvision.models")
    parser.add_argument("--image-size", type=int, default=224, help="height and width in pixels")
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--bf16", action="store_true", help="use bfloat16 (slow on many CPUs)")
    parser.add_argument("--steps", type=int, default=20, help="to measure, after 5 to warm up")
    parser.set_defaults(checkpoint=None, timeout=600)  # for form_group
    return parser.parse_args(flags)


def main():
    args, device, _ = script.form_group(parse_args())
    world_size = dist.get_world_size()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")  # TensorFloat-32, as in convolutions
    model = models.get_model(args.model).to(device, memory_format=torch.channels_last)
    ddp_model = DDP(model, gradient_as_bucket_view=True) if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    images = images.to(device, memory_format=torch.channels_last)
    labels = torch.randint(1000, (args.batch_size,), device=device)

    def time_step(network):
        """Return the seconds of a training step. Only ddp_model exchanges gradients."""
        script.restart_alarm(args.timeout)
        dist.barrier()
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(5):
        time_step(ddp_model)
    seconds = [[time_step(ddp_model), time_step(model)] for _ in range(args.steps)]
    seconds = torch.tensor(seconds, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # a step takes as long as on the slowest rank
    step, step_alone = seconds.median(0).values.tolist()
    script.log(f"{args.model} | world size {world_size} on {device.type}, "
               f"threads {torch.get_num_threads()} | torch {torch.__version__} | "
               f"{args.batch_size} images of {args.image_size} pixels per process")
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    script.log(f"{world_size * args.batch_size / step:,.1f} images/s  step {1000 * step:.1f} ms, "
               f"without exchange {1000 * step_alone:.1f} ms  "
               f"communication overhead {100 * (1 - step_alone / step):.1f} %  "
               f"gradients {gradients / 1e6:.1f} MB")
    script.close_group()


if __name__ == "__main__":
    main()
