# SPDX-License-Identifier: MIT-0
"""What check_copy.py prints: a function for each promise, in the order in which they are printed.

seen has the records (class Record) of the processes of each job, by the name of the job; problems
has how the other jobs ended.
"""
import dataclasses
import math
import os
import re
import sys

TRAINING_SAMPLES, VAL_SAMPLES = 54, 23  # 3 steps of 16 samples in an epoch; 6 are left out


@dataclasses.dataclass
class Record:
    """What watch_copy.py has seen in one process of one job. Digests are texts."""
    # Of each step of an optimizer: rates (and its other options), norms of the gradients by name,
    # and of the calls of the loss before it: losses, parts (digests of batches), number of samples,
    # rows (digests of a sample, and of each of its parts), modes (digests of module.training)
    steps: list = dataclasses.field(default_factory=list)
    # Of each call of evaluate(): results, samples (number), draws (states of random numbers, where
    # they are drawn), changes (of buffers), ddp (called with a DDP model that has buffers), and
    # in the job "evaluation" results again
    evaluations: list = dataclasses.field(default_factory=list)
    sizes: list = dataclasses.field(default_factory=list)  # of the data sets
    samples: list = dataclasses.field(default_factory=list)  # digests of some, for each data set
    both: dict = None  # how many samples are read, and are in both sets: see in_both()
    loss: dict = None  # see losses_of_parts()
    weights: dict = dataclasses.field(default_factory=dict)  # digests, at the end
    others: dict = dataclasses.field(default_factory=dict)  # digests of the rest of saved, progress
    saved: dict = dataclasses.field(default_factory=dict)  # digests of what the file has
    written: list = dataclasses.field(default_factory=list)  # files of torch.save()
    args: dict = dataclasses.field(default_factory=dict)  # numbers among the copy's settings
    found_file: bool = False  # that of --checkpoint, at the start
    stopped: bool = False  # by SIGTERM
    seconds: float = 0.0


# ---- What is printed ----
said = []  # the first word of each line
notes = []  # to be said last


def say(word, text):
    said.append(word)
    print(f"{word:4}  {text}", flush=True)


def check(promise, good, otherwise):
    """Print whether a promise holds. Return it."""
    say("ok" if good else "FAIL", promise if good else f"{promise}: {otherwise}")
    return good


def skip(promise, reason):
    say("----", f"not checked: {promise}: {reason}")


def show(results, others=()):
    """Return results as text, with enough digits to differ from others."""
    digits = 4 if [f"{result:.4g}" for result in results] != [f"{other:.4g}" for other in others] \
        else 9
    return ", ".join(f"{result:.{digits}g}" for result in results)


def some(names):
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def say_the_rest():
    """Print the notes, and the number of lines of each kind."""
    for text in notes:
        say("note", text)
    if said.count("FAIL") > 1:
        print("      Mend the first FAIL first. It may cause the others.")
    names = {"ok": "ok", "FAIL": "FAIL", "----": "not checked", "note": "noted"}
    if "ok" in said or "FAIL" in said:
        print(", ".join(f"{said.count(word)} {name}" for word, name in names.items()
                        if word in said))


# ---- The promises, in the order in which they are printed ----
SAMPLES = ("Use random numbers of torch or random in transforms, and numpy with a seed for each "
           "sample. Change no sample in place: clone() it")


def check_data(seen):
    """Compare what load_data() returns in three processes."""
    promise = "all processes, and all starts, load the same data"
    if "data of two" not in seen:
        skip(promise, "two processes have not loaded it")
        return True
    of_all = [(rank.sizes, rank.samples) for name in ("data", "data of two")
              for rank in seen.get(name, [])]
    return check(promise, all(samples == of_all[0] for samples in of_all),
                 "they load other samples. Sort what comes from a set or a folder, seed what is "
                 "random (random, numpy, pandas, scikit-learn), use no hash() of strings, and load "
                 "all samples on all ranks")


def check_leak(seen):
    """Look for validation samples among the training samples."""
    promise = "no validation sample is a training sample"
    data = seen["data"][0]
    if not data.both:
        skip(promise, "load_data() does not return two sets with samples")
        return
    found, (samples, tests) = data.both, data.sizes[:2]
    (read_samples, read_tests), both, different = found["read"], found["both"], found["different"]
    by_chance = 1 - found["once"] / read_samples  # in a table of few values
    leak = both > 2 and both / different * samples / read_samples > 0.5 + by_chance
    counts = f"{both} of {different} different validation samples are training samples"
    if read_samples < samples or read_tests < tests:
        promise += f" ({read_tests} of {tests} and {read_samples} of {samples} are read)"
    if both and not leak:
        notes.append(f"{counts}. If they are not equal by nature, divide the data before you "
                     "repeat or transform samples")
    elif not leak and different * read_samples < 10 * samples and read_samples < samples:
        skip(promise, "these are too few to say it")
    else:
        check(promise, not leak, f"{counts}. Draw both sets in one call, from one split, and "
              "repeat samples after it")


def check_ends(seen, problems):
    """Say whether two processes train to the end, and what both of them write."""
    end = problems.get("two", "")
    waits = re.search("waits in|has ended|[Cc]onnection|SIGABRT", end)
    errors = re.search(r"^ +(?!dist|torch)\w*(Error|SystemExit):(?!.*(onnection|[Tt]imed out))",
                       end, re.M)
    ends = check("two processes train to the end", "two" in seen, ("make the same calls of "
                 "torch.distributed on all ranks, in the same order. Move them out of `if rank == "
                 "0`, let all ranks end a loop together, and use all layers on all ranks (a layer "
                 "that is left out at random needs DDP(..., find_unused_parameters=True)):"
                 if waits and not errors else "they end with an error:") + end)
    if ends:
        both = {*seen["two"][0].written} & {*seen["two"][1].written}
        if both:
            notes.append(f"both processes write {some(sorted(map(os.path.basename, both)))}: write "
                         "it below `if rank == 0`")


def check_ranks(seen):
    """Compare weights, and the rest of what is saved, on two processes at their end."""
    first, second = seen["two"]
    different = [name for name, value in first.weights.items()
                 if second.weights.get(name) != value]
    check("all processes have the same weights at the end", not different,
          f"these differ: {some(different)}. Call ddp_model(...) in training, and in the loss "
          "model(...), no method of it; wrap each model in DDP; set requires_grad in build_model")
    different = [name for name, value in first.others.items()
                 if second.others.get(name) != value]
    if different:
        check("what is saved is the same on all processes", False, f"these differ: "
              f"{some(different)}. Compute them from results of all ranks, as evaluate() and "
              "Sums.results() return them")


def check_loss(seen, problems):
    """Look whether loss and counts are a mean and sums. Return it, in evaluation and training."""
    promise = "the loss is a mean over the samples, and the counts are sums"
    found = seen["loss"][0].loss if "loss" in seen else None
    if not found:
        skip(promise, f"a loss of some of 16 samples ends with an error:{problems['loss']}"
             if "loss" in problems else "the loss is not called for 10 samples or more, by its "
             "name, with a model and tensors of a row for each sample")
        return True, True
    modes = [found["evaluation"], found["training"]]
    for mode in modes:
        what = what_is_wrong(mode)
        if what:
            check(promise, False, what)
            return mode is not modes[0], False
    of_gradients, tolerance = (0.1, 2e-2) if found["rounds"] else (1e-3, 1e-3)
    # Dropout and BatchNorm hide it in training: then the gradient in evaluation mode shows it
    means = [mode["draws"] or mode["changes"] or is_mean(mode["parts"], 0, tolerance)
             for mode in modes]
    means[1] = means[1] and (found["difference"] <= of_gradients or not means[0])
    if means[0] and modes[0]["draws"]:
        skip(promise, "it draws random numbers in eval()")
    elif all(means):
        check(promise, True, "")
    else:
        ten, three, seven = (values[0] for values in modes[means[0]]["parts"])
        where = "training " if means[0] else ""
        notes.append(f"the {where}loss of 10 samples is {ten:.4g}, and the mean of the losses of 3 "
                     f"and 7 of them is {(3 * three + 7 * seven) / 10:.4g} (their gradients differ "
                     f"by {found['difference']:.1g}). So it depends on how a batch is divided "
                     "among the processes. For class weights or ignored tokens, see make-it-yours. "
                     "Gather pairs from all ranks. Compute no statistics of a batch. Look for "
                     "shapes that broadcast: (N, 1) and (N,)")
    return all(means[:1]), all(means)


def is_mean(parts, place, tolerance):
    """Return whether a number of 10 samples is the mean of those of 3 and 7 of them."""
    ten, three, seven = (values[place] for values in parts)
    return math.isclose((3 * three + 7 * seven) / 10, ten, rel_tol=tolerance, abs_tol=1e-6)


def what_is_wrong(mode):
    """Return in words that the loss is a sum, or divided by a number, or that a count is a mean."""
    ten, three, seven = (values[0] for values in mode["parts"])
    tolerance = 0.25 if mode["draws"] else 1e-2 if mode["changes"] else 1e-3
    if ten and (math.isclose(ten, three + seven, rel_tol=tolerance) or
                math.isclose(100 * ten, 9 * three + 49 * seven, rel_tol=tolerance)):
        return (f"the loss of 10 samples is {ten:.4g}, and the losses of 3 and 7 of them are "
                f"{three:.4g} and {seven:.4g}. Return a mean over the samples, not a sum, without "
                "a factor for their number")
    for place, count in enumerate(mode["parts"][0][1:], 1):
        if count % 1 and not mode["draws"] and is_mean(mode["parts"], place, 1e-3):
            return "the counts are means. Return sums over the samples: metrics() divides them"
    return ""


def check_steps(seen, mean):
    """Compare the steps of one and two processes: their number, samples, rates and gradients."""
    promise = "one and two processes make the same steps: samples, rates and gradients"
    one, first, second = seen["one"][0].steps, seen["two"][0].steps, seen["two"][1].steps
    say_the_order(one)
    sizes = [sum(steps[0]["number"]) if steps else 0 for steps in (one, first, second)]
    if len(one) != len(first) or sizes[0] != sizes[1] + sizes[2]:
        check(promise, False, f"one process makes {len(one)} steps, the first of {sizes[0]} "
              f"samples; two make {len(first)}, of {sizes[1]} + {sizes[2]} samples. Divide each "
              "batch among the processes: a share of the samples for each rank (by "
              "DistributedSampler, in place of shuffle=True), and global_batch / world_size of it")
        return
    same_samples = compare_samples(one, first, second)
    if same_samples is False:
        check(promise, False, "the samples differ. Let the order depend on seed and epoch alone, "
              f"and the share on the rank, not the local rank. {SAMPLES}")
        return
    rates = [(rate, other) for step, step_of_two in zip(one, first)
             for rate, other in zip(step["rates"], step_of_two["rates"])]
    if not all(math.isclose(*pair, rel_tol=1e-3) for pair in rates):
        check(promise, False, "rates or other options of the optimizer differ. Compute them from "
              "the global batch, and call a scheduler's step() on all ranks")
        return
    different, unknown = compare_gradients(seen)
    found = seen["loss"][0].loss if "loss" in seen else None
    if different and not unknown:
        unknown = ("random transforms or padding differ" if same_samples is None else
                   "the loss is no mean over the samples" if not mean else
                   "the loss draws random numbers in eval()"
                   if found and found["evaluation"]["draws"] else "")
    if unknown:
        skip(promise, f"of the gradients: {unknown}")
    else:
        check(promise, not different, f"these gradients differ: {some([*different])}. "
              f"{remedy_of_gradients([*different.values()])}")


def say_the_order(steps):
    """Note if the two epochs have the same order. In random transforms, labels show it."""
    rows = [[row for step in part for row in step["rows"]]
            for part in (steps[:len(steps) // 2], steps[len(steps) // 2:])]
    for place in range(min(map(len, rows[0] + rows[1]), default=0)):
        orders = [[row[place] for row in epoch] for epoch in rows]
        if orders[0] == orders[1] and len({*orders[0]}) > 2:
            notes.append("both epochs have the same order of samples: call "
                         "sampler.set_epoch(epoch) before each, or shuffle by a seed of the epoch")
            return


def compare_samples(one, first, second):
    """Return whether each step has the same samples on one and two processes. None: unknown.

    Random transforms may differ: then some part of the samples, as their labels, is the same.
    """
    def of_each(*of_ranks):
        """Return the samples of each step; of graphs, the batches of each rank."""
        return [[row for step in steps for row in step["rows"]]
                or [[part] for step in steps for part in step["parts"]] for steps in zip(*of_ranks)]

    def same(place):
        of_one, of_two = ([sorted(row[place] for row in step if place < len(row))
                           for step in steps] for steps in (alone, of_both))
        return of_one == of_two and (place == 0 or len({*of_one[0]}) > 2)

    alone, of_both = of_each(one), of_each(first, second)
    if any(alone) and same(0):
        return True
    parts = range(1, len(alone[0][0]) if alone[0] else 0)
    return None if any(map(same, parts)) or not any(step["rows"] for step in one) else False


def compare_gradients(seen):
    """Return the ratios of norms that differ, by name, and why they cannot be compared, or ''.

    First as they are in training, then in evaluation mode: without dropout and BatchNorm.
    """
    for names, unknown in ((("one", "two"), "the optimizer computes them itself"),
                           (("gradients", "gradients of two"), "the model has none in eval()")):
        norms, others = ({weight: norm for step in reversed(seen[name][0].steps)
                          for weight, norm in step["norms"].items()} if name in seen else {}
                         for name in names)
        if not any(norms.values()) or not others:
            return {}, unknown
        tolerance = 2e-2 if rounds(seen) else 1e-3
        least = 1e-4 * math.hypot(*norms.values()) / math.sqrt(len(norms))  # or rounding
        ratios = {name: others.get(name, 0.0) / value if value else math.inf
                  for name, value in norms.items()
                  if abs(value - others.get(name, math.inf)) > tolerance * max(value, least)}
        if not ratios:
            break
    return ratios, ""


def remedy_of_gradients(ratios):
    if ratios and abs(ratios[0] - 1) > 0.1 and all(
            math.isclose(ratio, ratios[0], rel_tol=1e-2) for ratio in ratios):
        return (f"On two processes, they are {ratios[0]:.3g} times as large. Multiply each loss by "
                "len(batch[0]) * world_size / global_batch before backward() (in synthetic_ddp, by "
                "nothing)")
    return ("Call ddp_model(...) in training, and in the loss model(...), no method of it; call "
            "zero_grad() once, before the parts, and clip after the last part; compute class "
            "weights and statistics from all samples, not from a rank's share; use random numbers "
            "of torch in the loss and in build_model, not of numpy or random; keep no state in "
            "attributes or globals")


def check_evaluation(seen, mean):
    """Compare the validation results of the same weights: again, and on two processes."""
    promise = "the same weights have the same validation results on one and two processes"
    found = {name: ranks[0].evaluations[0] for name, ranks in seen.items()
             if ranks[0].evaluations and ranks[0].evaluations[0]["results"]}
    if not {"one", "evaluation", "evaluation of two"} <= {*found}:
        if "one" not in found:
            skip(promise, "no evaluate() is called in two epochs, or there are no samples")
        return
    say_what_is_evaluated(seen, found["one"])
    evaluation = found["evaluation"]
    results, again = evaluation["results"], evaluation["again"]
    if str(again) != str(results) or evaluation["changes"]:  # NaN is not equal to NaN
        changes = "it changes the model. " if evaluation["changes"] else ""
        check(promise, False, f"a second evaluation of the same weights has other results: "
              f"{show(results, again)}, then {show(again, results)}. {changes}Call model.eval() in "
              "evaluate(); augment images, and mix samples, only if model.training; give F.dropout "
              "training=self.training; add up no results of earlier evaluations")
        return
    if evaluation["draws"]:
        skip(promise, "the evaluation draws random numbers")
        draws = [draw for other in seen["one"][0].evaluations for draw in other["draws"]]
        if len({*draws}) == len(draws):
            notes.append("the evaluation draws other random numbers each time: give F.dropout "
                         "training=self.training, or call torch.manual_seed(0) before evaluate()")
        return
    on_two = found["evaluation of two"]["results"]
    pairs = [*zip(on_two, results)][not mean:]  # a loss that is no mean has a note of its own
    tolerance = 2e-2 if rounds(seen) else 2e-3
    same = all(math.isclose(*pair, rel_tol=tolerance, abs_tol=1e-6)
               or str(pair[0]) == str(pair[1]) for pair in pairs)
    if not mean and not (same and pairs):
        skip(promise, "the loss is no mean over the samples: what each rank computes depends on "
             "its batches")
        return
    check(promise, same,
          f"{show(on_two, results)} on two, {show(results, on_two)} on one. Evaluate each sample "
          "once: let each rank take its share, without drop_last, and return the results of the "
          "sums over all ranks. Draw no random numbers for these samples. Return counts as sums "
          "over the samples, not as means of a batch; "
          "compute F1, a correlation or a rank from counts or outputs of all samples, and class "
          "weights and statistics from all samples, not from a batch or a rank's share")


def say_what_is_evaluated(seen, evaluation):
    """Note another number of samples than there are, and a call with the DDP model."""
    sizes = seen["data"][0].sizes
    wanted = VAL_SAMPLES if len(sizes) > 1 and sizes[1] else 0
    for name, processes in (("one", "one process"), ("two", "two processes")):
        counts = [sum(rank["samples"] for rank in ranks) for ranks in
                  zip(*(rank.evaluations for rank in seen.get(name, [])))]
        if wanted and counts and any(counts) and wanted not in counts:
            notes.append(f"{counts[0]} samples are evaluated on {processes}, where the validation "
                         f"set has {wanted}")
    if "two" in seen and any(found["ddp"] for found in seen["two"][0].evaluations):
        notes.append("evaluate() is called with the DDP model, which exchanges its buffers for "
                     "each batch: with unequal numbers of batches, the ranks wait for each other. "
                     "Call it with model")


# What is compared in each step after a resume, in this order, and the remedy
AFTER_A_RESUME = {
    "rates": ("rate", "Put the scheduler into saved, before resume() is called"),
    "modes": ("mode", "Call model.train() after an evaluation of your own"),
    "rows": ("samples", f"{SAMPLES}. Save only after a step(), and at the end of its epoch"),
    "losses": ("loss", "Put all models into saved, and counters into progress, before resume() is "
               "called, and load no other weights after it. Use random numbers of torch. Keep no "
               "state in attributes or globals: register a queue as a buffer of a model, and begin "
               "a hidden state with zeros"),
    "norms": ("gradient", "Call optimizer.zero_grad() before each step. clone() a gradient that "
              "you keep")}
LATER = ("Put what must survive a stop into saved or progress, before resume() is called: models, "
         "optimizers, averages, counters")


def check_resume(seen, problems):
    """Compare a run that is stopped in its second epoch, and resumed, with one that is not."""
    promise = "a stopped and resumed run ends with the same numbers"
    one = seen["one"][0]
    if not one.saved:
        skip(promise, "nothing is saved in the file of --checkpoint")
        return
    if "stopped" in seen and not seen["stopped"][0].stopped:
        if len(one.steps) < 5:
            skip(promise, f"two epochs have only {len(one.steps)} steps")
        else:
            check(promise, False, "SIGTERM does not stop the run, although it is received")
        return
    if "resumed" not in seen:
        check(promise, False, f"the resumed run does not end{problems['resumed']}")
        return
    resumed = seen["resumed"][0]
    if not resumed.found_file:
        check(promise, False, "a run that is stopped in its second epoch has saved nothing. Save "
              f"after each epoch{problems.get('stopped', '')}")
        return
    if len(resumed.steps) >= len(one.steps):
        check(promise, False, f"the resumed run makes all {len(one.steps)} steps again. Load the "
              "file of --checkpoint by resume(), count in progress, and let errors end the run")
        return
    first, remedy = first_difference(one, resumed)
    before, after = ({**job.weights, **job.saved} for job in (one, resumed))
    different = [place for place in before if before[place] != after.get(place)]
    results = {str([evaluation["results"] for evaluation in job.evaluations[-1:]])
               for job in (one, resumed)}
    different += ["validation results"] * (len(results) - 1)
    check(promise, not different, f"these differ: {some(first + different)}. {remedy}")


def first_difference(one, resumed):
    """Return what differs first after a resume (a list of one text, or none), and the remedy."""
    steps = zip(one.steps[len(one.steps) - len(resumed.steps):], resumed.steps)
    for number, (before, after) in enumerate(steps, 1):
        for key, (name, remedy) in AFTER_A_RESUME.items():
            if before[key] != after[key]:
                return ([f"{name} of step {number} after the resume"],
                        remedy if number == 1 else LATER)
    return [], LATER


def rounds(seen):
    """Return whether the copy computes in bfloat16 or float16."""
    found = seen["loss"][0].loss if "loss" in seen else None
    return found["rounds"] if found else "--bf16" in sys.argv
