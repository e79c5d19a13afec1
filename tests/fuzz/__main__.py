"""Fuzzes parsers: ``python -m tests.fuzz TARGET [--seconds 60]``; a target, a group of them, or ``all``.

Coverage-guided by atheris (libFuzzer). What it finds is written to ``build/fuzz``; put it into
``tests/fuzz/corpus/TARGET`` with a name that says what it was, and the suite plays it for ever.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
CORPUS = HERE / "corpus"
FOUND = HERE.parents[1] / "build" / "fuzz"
RSS_LIMIT_MB = 700
"""grpc, protobuf, pydantic and the instrumentation take 200 of them; no input may take much."""
INPUT_TIMEOUT_S = 10
INSTRUMENTED = (
    "proxyd.wire",
    "proxyd.runtime",
    "proxyd.core.policy",
    "proxyd.core.traces",
    "proxyd.core.trace_files",
    "proxyd.core.units",
)


def fuzz(target: str, seconds: int, corpus: pathlib.Path, max_len: int = 8192) -> None:
    """In this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from tests.fuzz import targets
    run = targets.TARGETS[target] if target in targets.TARGETS else targets.grouped(target)

    def one(data: bytes) -> None:
        run(data)

    FOUND.mkdir(parents=True, exist_ok=True)
    options = [
        sys.argv[0],
        f"-max_total_time={seconds}",
        f"-rss_limit_mb={RSS_LIMIT_MB}",
        f"-timeout={INPUT_TIMEOUT_S}",
        f"-max_len={max_len}",
        f"-artifact_prefix={FOUND}/{target}-",
        "-print_final_stats=0",
        "-verbosity=0",
        str(corpus),
    ]
    atheris.Setup(options, one)
    atheris.Fuzz()


def start(target: str, seconds: int, corpus: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, from well-formed inputs and what was found before."""
    from tests.fuzz.seeds import seeds
    from tests.fuzz.targets import GROUPS

    members = GROUPS.get(target, (target,))
    for place, name in enumerate(members):
        inputs = seeds(name) + [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
        for number, data in enumerate(inputs):
            (corpus / f"{name}-{number}").write_bytes(bytes([place]) + data if target in GROUPS else data)
    command = [sys.executable, "-m", "tests.fuzz", target, "--seconds", str(seconds), "--corpus", str(corpus)]
    # libFuzzer ends by itself; the limit is for a parser that hangs in one call of C code. And it stands between us and
    # the fuzzer, because a process inherits the peak memory of the one that started it: after a whole run of the suite
    # gigabytes, which libFuzzer took for its own.
    command = ["timeout", str(seconds + 60), *command]
    return subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, errors="replace")


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60, help="for all that were named together")
    parser.add_argument("--corpus", type=pathlib.Path, help="fuzz in this process, from the inputs there")
    args = parser.parse_args()
    if args.corpus is not None:
        fuzz(args.target, args.seconds, args.corpus)
        return 0
    from tests.fuzz.targets import GROUPS, TARGETS

    if args.target not in ("all", *GROUPS, *TARGETS):
        parser.error(f"no such target; there are all, {', '.join((*GROUPS, *TARGETS))}")
    names = list(GROUPS) if args.target == "all" else [args.target]
    failed = 0
    for name in names:
        with tempfile.TemporaryDirectory() as corpus:
            done = start(name, max(1, args.seconds // len(names)), pathlib.Path(corpus))
        failed += done.returncode != 0
        print(f"{name}: {'ok' if done.returncode == 0 else done.stderr[-4000:]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
