"""Generate proxyd/v1 from protos/proxyd/v1, or check that what is committed is in step (``--check``).

The same pinned tools (the ``dev`` extra) give the same bytes everywhere, so the check is a plain comparison.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "protos"
PACKAGE = Path("proxyd/v1")
PACKAGE_INIT = '"""GENERATED from protos/proxyd/v1 by tools/protos.py. Do not edit: run `make protos`."""\n'


def generate(out: Path) -> None:
    """Write the package below *out*; raises CalledProcessError when protoc refuses a file."""
    protos = sorted((PROTO_ROOT / PACKAGE).glob("*.proto"))
    if not protos:
        raise SystemExit(f"no .proto file under {PROTO_ROOT / PACKAGE}")
    bin_dir = Path(sys.executable).parent
    (out / PACKAGE).mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{PROTO_ROOT}",
            f"--plugin=protoc-gen-mypy={bin_dir / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={bin_dir / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *(str(path) for path in protos),
        ],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    (out / PACKAGE / "__init__.py").write_text(PACKAGE_INIT)


def files_of(base: Path) -> dict[str, bytes]:
    """Name to content of the generated files below *base*."""
    found = (path for path in (base / PACKAGE).glob("*") if path.suffix in {".py", ".pyi"})
    return {path.name: path.read_bytes() for path in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the committed code is stale")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, present = files_of(Path(scratch)), files_of(ROOT)
    stale = sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))
    if not stale:
        print(f"{PACKAGE}: {len(fresh)} files in step with the protos")
        return 0
    if args.check:
        print(f"{PACKAGE} is not what the protos generate: {', '.join(stale)}. Run `make protos`.", file=sys.stderr)
        return 1
    (ROOT / PACKAGE).mkdir(exist_ok=True)
    for name in stale:
        target = ROOT / PACKAGE / name
        if name in fresh:
            target.write_bytes(fresh[name])
        else:
            target.unlink()
    print(f"{PACKAGE}: wrote {', '.join(stale)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
