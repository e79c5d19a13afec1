from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.__main__ import code_of, reporting, results_of, said
from tests.groups import GROUPS, TESTS, group_of, may_hold, room_of

ROOT = TESTS.parent


def test_every_test_file_is_in_a_group_and_every_group_has_some() -> None:
    files = sorted(TESTS.rglob("test_*.py"))
    assert len(files) > 100
    groups = {file: group_of(file, ()) for file in files}
    assert set(groups.values()) == set(GROUPS)
    assert all(room_of(file) for file in files)
    judged = {TESTS / name for names in GROUPS.values() for name in names}
    assert all(path.exists() for path in judged), "a file that was judged has gone, or has another name"
    assert len(judged) == sum(len(names) for names in GROUPS.values()), "judged twice"


@pytest.mark.parametrize(
    ("path", "marks", "group"),
    [
        ("unit/core/test_lanes.py", (), "together"),
        ("unit/core/test_lanes.py", ("alone",), "alone"),
        ("e2e/test_delivery.py", ("timeout",), "a_few"),
        ("e2e/test_delivery.py", ("alone",), "alone"),
        ("e2e/test_a_new_file.py", (), "alone"),
        ("wan/test_wan_links.py", ("netns", "slow"), "alone"),
        ("faults/test_soak.py", ("slow", "together"), "together"),
        ("torch/test_anything.py", (), "by_file"),
        ("a_new_room/test_it.py", (), "alone"),
        ("test_here.py", (), "alone"),
        ("../elsewhere/test_it.py", (), "alone"),
        ("wan/test_wan_links.py", ("together", "alone"), "together"),
    ],
)
def test_a_mark_wins_over_the_room_and_what_nobody_judged_runs_alone(path: str, marks: list[str], group: str) -> None:
    assert group_of((TESTS / path).resolve(), marks) == group


@pytest.mark.parametrize(
    ("path", "groups"),
    [
        ("faults/test_soak.py", {"together", "alone"}),
        ("torch/test_two_sites.py", {"by_file", "alone"}),
        ("e2e/test_delivery.py", {"a_few"}),
        ("e2e/test_wan.py", {"alone"}),
    ],
)
def test_a_file_is_left_out_where_it_can_have_no_test(path: str, groups: set[str]) -> None:
    assert {group for group in GROUPS if may_hold(TESTS / path, group)} == groups


SUITE = """
import pytest

def test_good():
    pass

def test_bad():
    assert 1 == 2

@pytest.mark.skip(reason="not here")
def test_skipped():
    pass

@pytest.fixture
def broken():
    raise OSError

def test_error(broken):
    pass
"""


def test_results_are_counted_and_what_failed_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir=.", *reporting(tmp_path / "it.xml")]
    subprocess.run([*command, "test_it.py"], cwd=tmp_path, capture_output=True)
    counts, bad = results_of(tmp_path / "it.xml")
    assert said(counts) == "1 failed, 1 passed, 1 skipped, 1 errors"
    assert bad == ["test_it.py::test_bad", "test_it.py::test_error"]
    assert results_of(tmp_path / "there_is_none.xml") == ({}, [])


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([0, 5], 0), ([5, 0], 0), ([5, 5], 5), ([1, 0], 1), ([0, 2], 2), ([5, 1], 1), ([1], 1)],
)
def test_one_bad_group_is_enough_and_an_empty_one_is_not(codes: list[int], code: int) -> None:
    assert code_of(codes) == code


def test_the_command_runs_each_group_once() -> None:
    """Tests of two groups and none of the third, from one command line."""
    tests = [
        "tests/unit/core/test_units.py::test_rates",
        "tests/faults/test_verdicts.py::test_an_unknown_variable_is_refused_by_both",
    ]
    # On one processor, where workers would gain nothing and cost seconds.
    one = min(os.sched_getaffinity(0))
    command = ["taskset", "--cpu-list", str(one), sys.executable, "-m", "tests", "-q", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    both = re.search(
        r"##### together: (\d+) passed.*##### a_few: 1 passed.*##### alone: no tests.*===== (\d+) passed in",
        done.stdout,
        re.DOTALL,
    )
    assert both, done.stdout
    assert int(both[2]) == int(both[1]) + 1 > 1
