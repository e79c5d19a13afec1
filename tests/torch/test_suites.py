"""torch's and torchft's own suites on our backend; what they are and the long form: ``python -m tests.torch.suites``.

Here each test of torch's suite runs once: those that our own name's gates let through across two sites, and what only
other names open under these.
"""

from __future__ import annotations

import functools

import pytest

from tests.torch.suites import running

pytestmark = [pytest.mark.needs_torch, pytest.mark.slow, pytest.mark.timeout(400)]

JOBS = 2


@functools.cache
def _open(mode: str) -> frozenset[str]:
    """The tests that the gates let through."""
    return frozenset(running.names()) - set(running.gates()[mode])


def _run(mode: str, names: frozenset[str], sites: int) -> None:
    results = running.run("distributed", mode, sites=sites, jobs=JOBS, only=sorted(names))
    bad = {one["name"]: f"{one['outcome']}: {one['why']}" for one in results if one["outcome"] != "passed"}
    expected = running.NAMES_ASSERTED & names if mode == "opened" else frozenset()
    assert expected == set(bad), "\n".join(f"{name}: {why}" for name, why in bad.items() if name not in expected)


def test_the_gates_are_known() -> None:
    """Each test of the suite runs, or the suite itself skips it for a reason; and it is as many as promised."""
    assert len(_open("proxyd")) >= 52
    assert len(_open("opened") - running.NAMES_ASSERTED) >= 70
    assert _open("opened") == _open("gloo"), "under the name of gloo the same tests run"
    assert _open("proxyd") <= _open("opened")
    for mode in running.MODES:
        assert set(running.gates()[mode]) <= set(running.names())
        assert all(running.gates()[mode].values()), "a test is skipped without a reason"


def test_torch_under_our_own_name_across_sites() -> None:
    _run("proxyd", _open("proxyd"), 2)


def test_torch_under_a_name_that_opens_more() -> None:
    _run("opened", _open("opened") - _open("proxyd"), 1)


def test_torch_with_what_only_mpi_runs() -> None:
    _run("opened-mpi", _open("opened-mpi") - _open("opened"), 2)


def test_torchft() -> None:
    results = running.run("torchft", "proxyd", jobs=JOBS)  # two of them wait for 30 s
    bad = [f"{one['name']}: {one['outcome']}: {one['why']}" for one in results if one["outcome"] != "passed"]
    assert not bad, "\n".join(bad)
    assert len(results) >= 22
