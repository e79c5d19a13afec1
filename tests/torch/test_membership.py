"""Who is in a group: names, jobs, ranks and sites, as agreed through a store. Ranks are threads of this process."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from proxyd_client import ConfigError, TransferTimeout
from tests.fakes.fake_agent import FakeAgent

pytestmark = pytest.mark.needs_torch

Join = Callable[..., list[Any]]


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    with FakeAgent(tmp_path) as agent:
        monkeypatch.setenv("PROXYD_SOCKET", str(agent.path))
        monkeypatch.delenv("PROXYD_JOB", raising=False)
        monkeypatch.delenv("PROXYD_SITE", raising=False)
        yield agent


@pytest.fixture
def store(agent: FakeAgent) -> Any:
    import torch.distributed as dist

    return dist.HashStore()


@pytest.fixture
def join(agent: FakeAgent) -> Iterator[Join]:
    from proxyd_client.torch.membership import join as join_one

    joined: list[Any] = []

    def join(
        store: Any, size: int, *, ranks: list[int] | None = None, timeout_s: float = 20, **options: Any
    ) -> list[Any]:
        timeout = datetime.timedelta(seconds=timeout_s)
        with ThreadPoolExecutor(size) as pool:
            each = options.pop("each", [None] * size)
            futures = [
                pool.submit(join_one, store, rank, size, timeout, options.get("global_ranks", ()), each[rank])
                for rank in (range(size) if ranks is None else ranks)
            ]
            members = [future.result() for future in futures]
        joined.extend(members)
        return members

    yield join
    for one in joined:
        one.leave(0.0)


def test_members_agree_on_a_name_a_job_and_each_other(join: Join, store: Any) -> None:
    members = join(store, 3)
    assert len({one.name for one in members}) == 1
    assert len({one.endpoint.job for one in members}) == 1
    assert [one.endpoint.rank for one in members] == [0, 1, 2]
    assert [member.rank for member in members[2].members] == [0, 1, 2]
    assert members[0].sites == ((0, 1, 2),)
    assert "group rank 1 (global rank 1, site " in members[0].describe(1)


def test_each_life_on_one_store_has_a_name_and_a_job_of_its_own(join: Join, store: Any) -> None:
    seen = set()
    for _ in range(20):
        members = join(store, 2)
        seen.add((members[0].name, members[0].endpoint.job))
        for one in members:
            one.leave(0.0)
            assert one.endpoint.closed
    assert len(seen) == 20
    assert len({name for name, _ in seen}) == 20


def test_groups_of_a_default_group_share_its_endpoint_and_count_it(join: Join, store: Any) -> None:
    import torch.distributed as dist

    world = join(store, 3)
    sub = join(dist.PrefixStore("sub", store), 2, global_ranks=[2, 0])
    assert [one.endpoint for one in sub] == [world[2].endpoint, world[0].endpoint]
    assert [member.rank for member in sub[0].members] == [2, 0]
    assert sub[0].name != world[0].name
    world[0].leave(0.0)
    assert not sub[1].endpoint.closed
    sub[1].leave(0.0)
    sub[1].leave(0.0)
    assert sub[1].endpoint.closed
    assert not sub[0].endpoint.closed


def test_groups_without_a_proxyd_default_group_share_one_job_per_store(join: Join, store: Any) -> None:
    import torch.distributed as dist

    first = join(dist.PrefixStore("x", dist.PrefixStore("one", store)), 2, global_ranks=[4, 5])
    second = join(dist.PrefixStore("two", store), 2, global_ranks=[5, 4])
    assert {one.endpoint.job for one in first + second} == {first[0].endpoint.job}
    assert first[1].endpoint is second[0].endpoint


def test_the_job_is_what_the_environment_or_the_options_say(
    join: Join, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from proxyd_client.torch import Options

    monkeypatch.setenv("PROXYD_JOB", "llama")
    assert join(store, 2)[1].endpoint.job == "llama"
    options = Options(job="other")
    assert join(store, 2, each=[options, options])[0].endpoint.job == "other"
    with pytest.raises(
        ConfigError, match=r"rank 1 could not join.*rank 1 belongs to job 'llama', and rank 0 to 'other'.*PROXYD_JOB"
    ):
        join(store, 2, each=[options, None])


def test_sites_are_the_agents_or_what_is_said(join: Join, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from proxyd_client.torch import Options

    options = Options(sites={0: "b", 1: "a", 2: "b", 3: "c"})
    assert join(store, 4, each=[options] * 4)[0].sites == ((0, 2), (1,), (3,))
    with pytest.raises(ConfigError, match=r"group rank 2 could not join.*no site for rank 2"):
        join(store, 3, each=[None, None, Options(sites={0: "a", 1: "a"})])
    monkeypatch.setenv("PROXYD_SITE", "elsewhere")
    assert {member.site for member in join(store, 2)[0].members} == {"elsewhere"}


@pytest.mark.parametrize("there", [[0], [1]])
def test_who_is_missing_is_named(join: Join, store: Any, there: list[int]) -> None:
    with pytest.raises(TransferTimeout, match=rf"group rank {there[0]} of 2 waited 0.5 s for (group rank 1|the first)"):
        join(store, 2, ranks=there, timeout_s=0.5)
