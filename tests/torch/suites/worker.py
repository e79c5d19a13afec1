"""Runs tests of a suite in this process: ``python -m tests.torch.suites.worker SUITE [NAME...]``; without names it
prints those there are. Results go to standard output, see :mod:`tests.torch.suites.lines`; whatever tests print goes to
standard error."""

from __future__ import annotations

import os
import sys
import unittest

from tests.torch.suites.lines import Lines


def main(suite: str, names: list[str]) -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    case: type[unittest.TestCase]
    if suite == "distributed":
        import multiprocessing

        multiprocessing.set_forkserver_preload(["tests.torch.suites.distributed_case"])
        from tests.torch.suites import distributed_case

        case, every = distributed_case.DistributedCase, distributed_case.names()
    else:
        from tests.torch.suites import torchft_case

        case = torchft_case.ProxydMultiPgTest
        every = list(unittest.TestLoader().getTestCaseNames(case))
    if not names:
        print("\n".join(every), file=output)
        return
    unittest.TestSuite(case(name) for name in names).run(Lines(output))
    output.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
