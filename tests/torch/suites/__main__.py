"""Public suites on our backend.

    python -m tests.torch.suites distributed --backend gloo|proxyd|opened|opened-mpi [--sites 2] [--jobs 2]
    python -m tests.torch.suites torchft [--sites 2]

``distributed`` is torch.testing._internal.distributed.distributed_test from the installed wheel, without what needs
DistributedDataParallel; ``torchft`` is torchft's process_group_test. Backends: ``gloo`` is the reference; ``proxyd`` is
ours under its own name, which the suite's gates don't know; ``opened`` is ours under the name "gloo"; ``opened-mpi`` is
ours under its own name, imported as "mpi", which opens all-to-all and small groups on CPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from tests.torch.suites import running
from tests.torch.suites.lines import summary


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch.suites", description=__doc__.split("\n")[0])
    parser.add_argument("suite", choices=("distributed", "torchft"))
    parser.add_argument("names", nargs="*", help="only these tests")
    parser.add_argument("--backend", choices=running.MODES, default="proxyd")
    parser.add_argument("--sites", type=int, choices=(1, 2), default=1, help="how many sites the ranks are at")
    parser.add_argument("--jobs", type=int, default=1, help="tests at once")
    parser.add_argument("--out", type=Path, help="results as JSON")
    parser.add_argument("--logs", type=Path, help="where to keep what the tests print")
    parser.add_argument("--write-gates", action="store_true", help="what was skipped, and why, into gates.json")
    options = parser.parse_args()
    results = running.run(
        options.suite,
        options.backend,
        sites=options.sites,
        jobs=options.jobs,
        only=options.names,
        log_directory=options.logs,
    )
    for result in results:
        if result["outcome"] == "failed":
            print(f"--- {result['name']}\n{result['why']}")
    reasons = Counter(result["why"] for result in results if result["outcome"] == "skipped")
    for reason, count in reasons.most_common():
        print(f"skipped {count:3d}: {reason}")
    print(f"{options.suite} on {options.backend}, {options.sites} site(s): {summary(results)}")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    if options.write_gates:
        running.write_gates(options.backend, results)
    return any(result["outcome"] == "failed" for result in results)


if __name__ == "__main__":
    sys.exit(main())
