"""Peak memory of one contender, in a process of its own.

Libraries are loaded and warmed up on two samples first, so that model, data and code are not
counted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from bench.cases import CASES, prepare
from bench.contenders import CONTENDERS
from bench.device import configure
from bench.peak_memory import peak


def peak_mib(
    case: str, contender: str, samples: int, size: int, device: str, tf32: bool
) -> float | None:
    """Measure in a fresh process; None where that cannot be done.

    The contender runs on the first `samples` of the case; `size` is its batch size or its probes.
    """
    arguments = [case, contender, str(samples), str(size), device]
    command = [sys.executable, "-m", "bench.contender_memory", *arguments]
    done = subprocess.run(command + ["--tf32"] * tf32, capture_output=True, text=True, check=False)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def _measure(case: str, contender: str, samples: int, size: int, device: str) -> float:
    method = CONTENDERS[contender]
    problem = prepare(CASES[case], device).head(samples)
    method.build(problem.head(2), 2)()
    run = method.build(problem, size)
    return peak(run, device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("samples", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("device")
    parser.add_argument("--tf32", action="store_true")
    options = parser.parse_args()
    configure(options.device, options.tf32)
    asked = (options.case, options.contender, options.samples, options.size, options.device)
    print(_measure(*asked))
