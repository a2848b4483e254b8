# SPDX-License-Identifier: MIT-0
"""Check an edited copy of a DDP script of this collection, on CPUs, in about half a minute.

    python check_copy.py my.py [flags of my.py]

The check trains my.py for two epochs on a few of its own samples: on one process, on two, and
stopped and resumed. It compares data, gradients, weights and results, and says what differs: for
gradients without augment(), and with random numbers that depend on the sample, not on the process.
Start it in the folder in which my.py finds its data.

Your files: my.py works in a temporary folder, which has copies of your files of up to 1 MB (16 MB
in all), and links to larger ones. What changes a copy, or removes a file, changes nothing of yours.
What Python would write to a linked file, to an absolute path or to ~ is refused. A program that
my.py starts, or a library that writes files without Python, can change these: the check only says
afterwards that a linked file has changed, not one in a linked folder (.git, environments, all above
10,000 entries). This was tried on Linux.

It does not see: later epochs, other samples, GPUs, whether the model learns; results that rank 0
computes from its share and only logs; files that all ranks write; the names (module.) in a file
that my.py saves by itself; an optimizer.step() after several batches, each with zero_grad(); equal
weights of a share's unequal parts (cifar10_ddp).

Exit status: 0 if all is ok, 1 after a FAIL, 2 if my.py cannot be checked, 3 if nothing fails, but
the steps of one and two processes, the validation results or the resume could not be compared: this
does not show that my.py is right. What is not checked is printed first (???? leads to status 3; not
----, for example without validation samples or resume()).
"""
import math
import os
import pathlib
import re
import signal
import sys
import tempfile

import scratch

TRAINING_SAMPLES, VAL_SAMPLES = 54, 23  # 3 steps in an epoch, and samples that are left out
WAIT = 60  # seconds: a process that computes nothing for longer waits for another


def main():
    """Return the exit status."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        print(__doc__)
        return 0 if sys.argv[1:] else 2
    path = os.path.realpath(sys.argv[1])
    if why_not(path):
        skip(sys.argv[1], why_not(path))
        return print_all()
    # Paths of sockets of loader processes (44 more characters here) have 103 at most
    short = "/tmp" if len(os.path.realpath(tempfile.gettempdir())) > 59 else None
    try:
        with tempfile.TemporaryDirectory(dir=short, ignore_cleanup_errors=True) as folder, \
                scratch.Servers(folder) as servers:
            return compare(servers, os.path.realpath(folder), path, sys.argv[2:])
    except KeyboardInterrupt:
        skip("the rest", "interrupted")
        return print_all()


def why_not(path):
    """Return why a file is no copy of a DDP script, or ''."""
    if not os.path.isfile(path):
        return "there is no such file"
    text = pathlib.Path(path).read_text(errors="replace")
    known = all(name in text for name in ("parse_args", "load_data", "train"))
    return "" if known else "it is no copy of a DDP script of this collection"


def compare(servers, folder, path, flags):
    """Train, print what holds and what differs, and return the exit status."""
    said.clear()
    mirror, common = make_mirror(folder, path, flags)
    seen, problems = train_copies(servers, common)
    if seen and check_data(seen, problems):
        for promise in (check_leak, check_ends, check_ranks, check_loss, check_steps,
                        check_evaluation, check_resume):
            if "two" in seen or promise not in (check_ranks, check_steps, check_evaluation):
                promise(seen, problems)
    changed = mirror.changed()
    if changed:
        say("note", "these linked files have changed during the check, by a program, or by a "
            f"library that writes without Python: {', '.join(changed)}")
    return print_all()


# ---- The training ----
def make_mirror(folder, path, flags):
    """Mirror the user's folders, say it, and return the Mirror and what all orders have."""
    mirror, folders = scratch.mirror_folders(folder, os.path.dirname(path))
    names = [os.path.relpath(path) for path in mirror.linked]
    links = f"and links to {len(names)} ({some(names)})" if names else "and no links"
    # Of 15 samples, two processes have 8 and 7: a loss without its weight is noticed
    text = pathlib.Path(path).read_text(errors="replace")
    equal_shares = re.search(r"global_batch\s*(//|%)|int\(args\.global_batch", text)
    batch = 16 if equal_shares else 15
    print(f"""\
Training {sys.argv[1]} on CPUs, at first on one process: two epochs of 3 steps of {batch} samples
each, of {TRAINING_SAMPLES} training samples, and {VAL_SAMPLES} validation samples if there are any.
It works in a temporary folder, with copies of {mirror.copied} of your files {links}. What Python
would write to a link, to an absolute path or to ~ is refused. A program that it starts, or a
library that writes without Python, can change these.""", flush=True)
    return mirror, {**folders, "folder": folder, "path": path, "flags": flags,
                    "global_batch": batch, "samples": [TRAINING_SAMPLES, VAL_SAMPLES]}


def train_copies(servers, common):
    """Return what is seen in each job (a Record of watch_copy.py for each rank), by its name.

    Return also how the other jobs ended. No job: the copy cannot be checked.
    """
    jobs = [{"kind": "Preparation", "name": "preparation", "root": "base"}]
    seen, problems = servers.do(jobs, **common, wait=900, limit=1800)
    if not problems:
        common["args"] = seen["preparation"][0].args
        jobs = [{"kind": "Training", "name": "one"}]
        seen, problems = servers.do(jobs, **common, wait=900, limit=1800)
    for end in problems.values():
        reason = ("it would change a file at an absolute path, in ~, or one that is linked. Open "
                  "data for reading alone, and write to new files at relative paths"
                  if scratch.REFUSED in end else
                  f"one process cannot train to the end (on a CPU, {TRAINING_SAMPLES} samples)")
        skip("anything", f"{reason}:{end}")
        return {}, {}
    one = seen["one"][0]
    if not one.steps:
        skip("anything", "train() has made no step of an optimizer")
        return {}, {}
    print(f"Now on two processes, and stopped and resumed: about {6 * one.seconds:.0f} s more (if "
          f"the processes wait for each other, {WAIT} s more).", flush=True)
    steps = len(one.steps)
    stop = max(min(steps * 2 // 3, steps - 2), steps // 2 + 1)  # in the second epoch
    wait = WAIT + one.seconds
    jobs = [{"kind": "Data", "name": "data", "size": 2},
            {"kind": "Training", "name": "two", "size": 2},
            {"kind": "Gradients", "name": "gradients of two", "size": 2},
            {"kind": "Gradients", "name": "gradients"},
            {"kind": "Loss", "name": "loss"},
            {"kind": "Stop", "name": "stopped", "server": 1, "stop": stop},
            {"kind": "Training", "name": "resumed", "server": 1, "root": "stopped"}]
    others, problems = servers.do(jobs, **common, wait=wait, limit=4 * wait)
    return {**seen, **others}, problems


# ---- What is printed ----
said = []  # the first word and the text of each line


def say(word, text):
    said.append((word, text))


def check(promise, good, otherwise):
    """Say whether a promise holds. Return it."""
    say("ok" if good else "FAIL", promise if good else f"{promise}: {otherwise}")
    return good


def skip(promise, reason, main=False):
    """Say that a promise is not checked. main: without it, the copy may be wrong."""
    say("????" if main else "----", f"not checked: {promise}: {reason}")


def some(names):
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def print_all():
    """Print what is said: first what is not checked, and last the notes. Return the exit status."""
    order = {"????": 0, "----": 1, "ok": 2, "FAIL": 2, "note": 3}
    for word, text in sorted(said, key=lambda line: order[line[0]]):
        print(f"{word:4}  {text}")
    words = [word for word, _ in said]
    if words.count("FAIL") > 1:
        print("      Mend the first FAIL first. It may cause the others.")
    counts = {"not checked": words.count("????") + words.count("----"), "ok": words.count("ok"),
              "FAIL": words.count("FAIL"), "noted": words.count("note")}
    print(", ".join(f"{count} {name}" for name, count in counts.items() if count))
    status = 1 if "FAIL" in words else 2 if "ok" not in words else 3 if "????" in words else 0
    if status == 3:
        print("This does not show that the copy is right: compare what is not checked by hand.")
    return status


# ---- The promises, in the order in which they are printed ----
SAMPLES = ("Use random numbers of torch or random in transforms, and numpy with a seed for each "
           "sample. Change no sample in place: clone() it")
CALLS = "Call ddp_model(...) in training, and in the loss model(...), no method of it"


def check_data(seen, problems):
    """Compare what load_data() returns in two processes. Return whether it is the same."""
    promise = "all processes, and all starts, load the same data"
    if "data" not in seen or not seen["data"][0].data:
        skip(promise, problems.get("data", "load_data() returns no data set, no tensors"))
        return True
    first, second = ([(part["size"], part["samples"][:20]) for part in rank.data]
                     for rank in seen["data"])
    same = check(promise, first == second,
                 "they load other samples. Sort what comes from a set or a folder, seed what is "
                 "random (random, numpy, pandas, scikit-learn), use no hash() of strings, and load "
                 "all samples on all ranks")
    if not same:
        skip("the rest", "it would differ, too")
    return same


def check_leak(seen, problems):
    """Look for validation samples among the training samples."""
    promise = "no validation sample is a training sample"
    sets = [(part["size"], part["samples"]) for rank in seen.get("data", [])[:1]
            for part in rank.data if part["size"]]
    if len(sets) < 2:
        skip(promise, "load_data() does not return two sets with samples")
        return
    (samples, training), (others, validation) = sets[:2]
    different = {*validation}
    both = different & {*training}
    of_all = len(both) / len(different) * samples / len(training)
    unique = len({*training}) / len(training)  # less in a table of few values
    counts = f"{len(both)} of {len(different)} different validation samples are training samples"
    if len(training) < samples or len(validation) < others:
        promise += f" ({len(validation)} of {others} and {len(training)} of {samples} are read)"
    if len(both) > 2 and of_all > 0.5 and unique > 0.9:
        check(promise, False, f"{counts}. Draw both sets in one call, from one split")
    elif both:
        say("note", f"{counts}. If they are not equal by nature, divide the data before you repeat "
            "or transform samples")
    else:
        check(promise, True, "")


def check_ends(seen, problems):
    """Say whether two processes train to the end."""
    end = problems.get("two", "")
    remedy = ("make the same calls of torch.distributed on all ranks, none below `if rank == 0`, "
              "let all end a loop together, and use all layers (or DDP(..., "
              "find_unused_parameters=True)):"
              if re.search("waits in|has ended|[Cc]onnection", end) else "they end with an error:")
    check("two processes train to the end", "two" in seen, remedy + end)


def check_ranks(seen, problems):
    """Compare weights, and the rest of what is saved, on two processes at their end."""
    first, second = (rank.state for rank in seen["two"])
    different = [name for name in first if first[name] != second.get(name)]
    check("all processes have the same weights at the end, and save the same", not different,
          f"these differ: {some(different)}. {CALLS}; wrap each model in DDP; set requires_grad "
          "in build_model; compute what you save from results of all ranks")


def check_loss(seen, problems):
    """Look whether the loss is a mean, by the losses of 10 samples, of 3 and 7 of them."""
    promise = "the loss is a mean over the samples"
    kinds = kinds_of_loss(seen)
    for mode in [mode for mode, kind in kinds.items() if kind in ("sum", "other")][:1]:
        ten, three, seven = seen["loss"][0].loss[mode]["losses"]
        numbers = (f"in {mode}, the loss of 10 samples is {ten:.4g}, and the losses of 3 and 7 of "
                   f"them are {three:.4g} and {seven:.4g}. ")
        if kinds[mode] == "sum" and mode == "evaluation":
            check(promise, False, f"{numbers}Return a mean over the samples, not a sum, without a "
                  "factor for their number")
        else:
            say("note", f"{numbers}It depends on how a batch is divided among the processes. See "
                "Loss and metrics in synthetic_ddp/make-it-yours.md: class weights, ignored "
                "tokens, pairs, and shapes that broadcast")
        return
    if not kinds:
        skip(promise, problems.get("loss", "it is not called for 10 samples or more, by its name, "
                                   "with a model and tensors of a row for each sample"))
    elif kinds["evaluation"] == "random":
        skip(promise, "it draws random numbers in eval()")
    else:
        check(promise, True, "")


def kinds_of_loss(seen):
    """Return by mode (evaluation, training): the loss is a mean, a sum, random, or other."""
    kinds = {}
    for mode, loss in (seen["loss"][0].loss.items() if "loss" in seen else ()):
        ten, three, seven = loss["losses"]
        tolerance = 1e-2 if loss["varies"] else seen["one"][0].tolerance
        if ten and (math.isclose(ten, three + seven, rel_tol=tolerance)  # or divided once more
                    or math.isclose(100 * ten, 9 * three + 49 * seven, rel_tol=tolerance)):
            kinds[mode] = "sum"
        elif loss["varies"]:
            kinds[mode] = "random"
        else:
            mean = math.isclose(10 * ten, 3 * three + 7 * seven, rel_tol=tolerance, abs_tol=1e-5)
            kinds[mode] = "mean" if mean else "other"
    return kinds


def check_steps(seen, problems):
    """Compare the steps of one and two processes: their number, samples, rates and gradients."""
    promise = "one and two processes make the same steps: samples, rates and gradients"
    one, first, second = seen["one"][0].steps, seen["two"][0].steps, seen["two"][1].steps
    say_the_order(one)
    sizes = [len(steps[0]["rows"]) if steps else 0 for steps in (one, first, second)]
    same_samples = compare_samples(one, first, second)
    if same_samples is None and {"gradients", "gradients of two"} <= seen.keys():
        # In these jobs, transforms of a Dataset draw the same on one and two processes
        same_samples = compare_samples(*(run.steps for name in ("gradients", "gradients of two")
                                         for run in seen[name])) or None
    different, unknown = compare_gradients(seen)
    no_mean = kinds_of_loss(seen).get("evaluation", "mean") != "mean"
    if len(one) != len(first) or sizes[0] != sizes[1] + sizes[2]:
        check(promise, False, f"one process makes {len(one)} steps, the first of {sizes[0]} "
              f"samples; two make {len(first)}, of {sizes[1]} + {sizes[2]} samples. Divide each "
              "batch among the processes: a share of the samples for each rank (by "
              "DistributedSampler, in place of shuffle=True), and global_batch / world_size of it")
    elif same_samples is False:
        check(promise, False, "the samples differ. Let the order depend on seed and epoch alone, "
              f"and the share on the rank, not the local rank. {SAMPLES}")
    elif not all(math.isclose(*pair, rel_tol=1e-3) for steps in zip(one, first)
                 for pair in zip(*(step["rates"] for step in steps))):
        check(promise, False, "rates or other options of the optimizer differ. Compute them from "
              "the global batch, and call a scheduler's step() on all ranks")
    elif different and (same_samples is None or no_mean):
        skip(promise, "of the gradients: random numbers, padding or the loss make them differ",
             main=True)
    elif unknown:
        skip(promise, f"of the gradients: {unknown}", main=True)
    else:
        check(promise, not different, f"these gradients differ: {some(different)}. Multiply each "
              "loss by its weight, len(batch[0]) * world_size / global_batch (in synthetic_ddp, by "
              f"nothing). {CALLS}; call zero_grad() once, before the parts, and clip after the "
              "last; compute class weights and statistics from all samples; draw random numbers of "
              "torch, not of numpy or random; keep no state in attributes")


def say_the_order(steps):
    """Note if the two epochs have the same order. In random transforms, labels show it."""
    rows = [[row for step in part for row in step["rows"]]
            for part in (steps[:len(steps) // 2], steps[len(steps) // 2:])]
    for place in range(min(map(len, rows[0] + rows[1]), default=0)):
        orders = [[row[place] for row in epoch] for epoch in rows]
        if orders[0] == orders[1] and len({*orders[0]}) > 1:
            say("note", "both epochs have the same order of samples: call "
                "sampler.set_epoch(epoch) before each, or shuffle by a seed of the epoch")
            return


def compare_samples(one, first, second):
    """Return whether each step has the same samples on one and two processes. None: unknown.

    Random transforms may differ: then some part of the samples, as their labels, is the same.
    """
    alone = [step["rows"] for step in one]
    of_both = [step["rows"] + other["rows"] for step, other in zip(first, second)]
    width = min((len(row) for step in alone + of_both for row in step), default=0)
    for place in range(width):
        of_one, of_two = ([sorted(row[place] for row in step) for step in steps]
                          for steps in (alone, of_both))
        if of_one == of_two and (place == 0 or len({*of_one[0]}) > 1):
            return True if place == 0 else None
    shapes = {str(shape) for step in one + first + second for shape in step["shapes"]}
    # If the second epoch has less than half of the first's again, they are random: MixUp
    half = len(alone) // 2
    epochs = [[{row[place] for step in steps for row in step} for place in range(width)]
              for steps in (alone[:half], alone[half:])]
    again = any(2 * len(before & after) >= len(before) for before, after in zip(*epochs))
    return False if again and len(shapes) == 1 else None  # of padded samples, they differ


def compare_gradients(seen):
    """Return which gradients differ in their norms, and why they cannot be compared, or ''.

    First as they are in training, then in evaluation mode: without dropout and BatchNorm.
    """
    for names, unknown in (
            (("one", "two"), "the optimizer computes them itself"),
            (("gradients", "gradients of two"), "they cannot be computed in eval()")):
        norms, others = (first_norms(seen[name][0].steps) if name in seen else {}
                         for name in names)
        if not any(norms.values()) or not others:
            return [], unknown
        least = 1e-4 * math.hypot(*norms.values()) / math.sqrt(len(norms))  # or rounding
        different = {place[1]: f"{place[1]} (on two, {others.get(place, 0.0):.3g} for {norm:.3g})"
                     for place, norm in norms.items() if abs(norm - others.get(place, math.inf)) >
                     seen["one"][0].tolerance * max(norm, least)}
        if not different:
            break
    return [*different.values()], ""


def first_norms(steps):
    """Return norms of gradients by step and name: of four, as shares may be alike by chance."""
    return {(number, name): norm for number, step in enumerate(steps[:4])
            for name, norm in step["norms"].items()}


def check_evaluation(seen, problems):
    """Compare the validation results of the same weights on one and two processes."""
    promise = "the same weights have the same validation results on one and two processes"
    found = [seen[name][0].evaluations[:1] for name in ("one", "two")]
    if not all(found) or not found[0][0]["results"]:
        sets = [part for rank in seen.get("data", [])[:1] for part in rank.data if part["size"]]
        skip(promise, "no evaluate() is called with a model in two epochs" if len(sets) > 1 else
             "there are no validation samples", main=len(sets) > 1)
        return
    [one], [two] = found
    no_mean = kinds_of_loss(seen).get("evaluation", "mean") != "mean"
    pairs = [*zip(two["results"], one["results"])][no_mean:]  # the loss has a note of its own
    same = all(math.isclose(*pair, rel_tol=2 * seen["one"][0].tolerance, abs_tol=1e-6)
               or str(pair[0]) == str(pair[1]) for pair in pairs)  # NaN is not equal to NaN
    if one["draws"]:
        say("note", "the evaluation draws random numbers. Unless it must, give F.dropout "
            "training=self.training, and augment images only if model.training")
    if one["dropout"]:
        check(promise, False, "dropout is active. Call model.eval() in evaluate()")
    elif one["draws"] and not same:
        skip(promise, "random numbers make them differ", main=True)
    elif no_mean and not (same and pairs):
        skip(promise, "the loss is no mean over the samples: what each rank computes depends on "
             "its batches", main=True)
    else:
        check(promise, same, f"{two['results']} on two, {one['results']} on one. Evaluate each "
              "sample once: let each rank take its share, without drop_last, and return the "
              "results of the sums over all ranks. Return counts as sums, not as means of a batch. "
              "Call model.eval(). Draw no random numbers for these samples. Compute F1, a "
              "correlation, class weights and statistics from counts or outputs of all samples")


def check_resume(seen, problems):
    """Compare a run that is stopped in its second epoch, and resumed, with one that is not."""
    promise = "a stopped and resumed run ends with the same numbers"
    one = seen["one"][0]
    stopped, resumed = (seen[name][0] if name in seen else None for name in ("stopped", "resumed"))
    if not one.saved:
        skip(promise, "nothing is saved in the file of --checkpoint", main=one.saved is False)
    elif stopped and not stopped.stopped and len(one.steps) < 5:
        skip(promise, f"two epochs have only {len(one.steps)} steps", main=True)
    elif stopped and not stopped.stopped:
        check(promise, False, "SIGTERM does not stop the run, although it is received")
    elif not resumed:
        check(promise, False, f"the resumed run does not end{problems['resumed']}")
    elif not resumed.found_file:
        check(promise, False, "a run that is stopped in its second epoch has saved nothing. Save "
              f"after each epoch{problems.get('stopped', '')}")
    elif len(resumed.steps) >= len(one.steps):
        check(promise, False, f"the resumed run makes all {len(one.steps)} steps again. Load the "
              "file of --checkpoint by resume(), count in progress, and let errors end the run")
    else:
        different = compare_ends(one, resumed)
        check(promise, not different, f"these differ: {some(different)}. Put what must survive a "
              "stop into saved or progress, before resume() is called: models, optimizers, "
              "schedulers, averages, counters; register a queue as a buffer. Load no other weights "
              "after it. Call model.train() after an evaluation of your own, and zero_grad() "
              f"before each step. {SAMPLES}")


def compare_ends(one, resumed):
    """Return the first difference in the last steps of two runs, and those at their ends."""
    steps = zip(one.steps[len(one.steps) - len(resumed.steps):], resumed.steps)
    of_steps = [f"{name} of step {number} after the resume"
                for number, (before, after) in enumerate(steps, 1)
                for name in ("rates", "rows", "losses", "norms") if before[name] != after[name]]
    ends = [{**run.state, "validation results": str([found["results"] for found in
                                                     run.evaluations[-1:]])}
            for run in (one, resumed)]
    return of_steps[:1] + [name for name in ends[0] if ends[0][name] != ends[1].get(name)]


if __name__ == "__main__":
    sys.exit(main())
