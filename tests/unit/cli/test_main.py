from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from proxyd import __version__
from proxyd.cli import main as cli
from proxyd.core.errors import ConfigError, RemoteError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A command ``proxyd probe`` whose ``run`` a test sets."""
    module = types.ModuleType("probe_command")
    module.add_arguments = lambda parser: parser.add_argument("--n", type=int, default=0)  # type: ignore[attr-defined]
    module.run = lambda args: args.n  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "probe_command", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", ("probe_command", "a test"))
    return module


def raising(error: BaseException) -> object:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage:" in captured.err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["chek"], "did you mean 'check'?"),
        (["zzz"], "known: agent, bench"),
        (["bench"], "needs one of: relay, local, grants"),
        (["bench", "all"], "'all' is none"),
        (["check"], "FILE"),
        (["version", "--nope"], "--nope"),
    ],
)
def test_wrong_usage_exits_2_on_stderr(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.out == ""


def test_the_exit_code_is_the_commands_own(command: types.ModuleType) -> None:
    assert cli.main(["probe", "--n", "3"]) == 3


def test_our_errors_become_a_line_and_a_code(command: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    command.run = raising(ConfigError("no site", why="it is empty", next_step="Set it"))  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr() == ("", "proxyd: no site: it is empty. Set it [config]\n")
    command.run = raising(RemoteError("the coordinator is gone"))  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == 1
    assert capsys.readouterr().err == "proxyd: the coordinator is gone [remote]\n"


def test_who_asked_for_json_gets_the_error_as_json(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    command.add_arguments = lambda parser: parser.add_argument("--json", action="store_true")  # type: ignore[attr-defined]
    command.run = raising(ConfigError("no site", why="it is empty", next_step="Set it"))  # type: ignore[attr-defined]
    assert cli.main(["probe", "--json"]) == 2
    wanted = {"code": "config", "what": "no site", "why": "it is empty", "next_step": "Set it", "exit_code": 2}
    assert json.loads(capsys.readouterr().out) == {"error": wanted}


def test_an_interrupt_is_130(command: types.ModuleType) -> None:
    command.run = raising(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == 130


def test_a_bug_keeps_its_traceback(command: types.ModuleType) -> None:
    command.run = raising(ZeroDivisionError())  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])
    command.run = raising(ModuleNotFoundError("no", name="proxyd.typo"))  # type: ignore[attr-defined]
    with pytest.raises(ModuleNotFoundError):
        cli.main(["probe"])


@pytest.mark.parametrize(
    ("module", "extra"), [("grpc.aio", "daemon"), ("pydantic", "daemon"), ("matplotlib", "report")]
)
def test_a_missing_extra_is_named(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str], module: str, extra: str
) -> None:
    command.run = raising(ModuleNotFoundError(f"No module named {module!r}", name=module))  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == 2
    assert f"pip install 'proxyd[{extra}]'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"proxyd {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from proxyd.cli.main import main; main(['--help']); main(['check', '--help']);"
        "heavy = {'grpc', 'google', 'pydantic', 'numpy', 'uvloop', 'rich', 'asyncio'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", [name for name, (module, _) in cli.COMMANDS.items() if importlib.util.find_spec(module)]
)
def test_every_command_helps_without_the_extras(name: str) -> None:
    """With grpc, pydantic and the others made unimportable, as after a bare ``pip install proxyd``."""
    code = (
        "import sys\n"
        "for name in ('grpc', 'google', 'pydantic', 'uvloop', 'rich', 'prometheus_client', 'matplotlib', 'torch'):\n"
        "    sys.modules[name] = None\n"
        f"from proxyd.cli.main import main; sys.exit(main({[*name.split(), '--help']!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"usage: proxyd {name}" in done.stdout


def test_a_bare_install_names_the_daemon_extra(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text("[coordinator]\n")
    code = (
        "import sys\nsys.modules['pydantic'] = None\n"
        f"from proxyd.cli.main import main; sys.exit(main(['check', {str(file)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "pip install 'proxyd[daemon]'" in done.stderr
    assert "Traceback" not in done.stderr
