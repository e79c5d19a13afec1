"""What frameworks do with torch.distributed, on proxyd, with all ranks at one site and with two at each of two; with
``PROXYD_TEST_GLOO=1`` on gloo as well. See :mod:`tests.torch.framework_checks`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from proxyd.cli.cluster import Cluster

pytestmark = [pytest.mark.needs_torch, pytest.mark.timeout(180)]

MIB = 1 << 20


@dataclasses.dataclass
class Place:
    """Where checks run: four ranks that live as long as they are in step, and the backend of their default group."""

    backend: str
    sockets: tuple[str, ...]
    world: Any = None

    def run(self, check: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        from tests.torch.worlds import World

        if self.world is None:
            self.world = World(4, self.sockets, backend=self.backend, timeout_s=30.0)
        try:
            return self.world.run(check, *arguments, **options)
        except BaseException:
            self.close()  # its ranks are out of step
            raise

    def close(self) -> None:
        if self.world is not None:
            self.world.close()
            self.world = None


# gloo shows that a check asks for what torch gives; a change of our code can't change that.
PLACES = ["one site", "two sites"] + ["gloo"] * ("PROXYD_TEST_GLOO" in os.environ)


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "gloo":
        one = Place("gloo", ())
    else:
        cluster: Cluster = request.getfixturevalue("cluster")
        near, far = cluster.agent("a").socket, cluster.agent("b" if request.param == "two sites" else "a").socket
        one = Place("proxyd", (near, near, far, far))
    yield one
    one.close()


CHECKS = (
    "megatron_overlap",
    "megatron_posted_ahead",
    "megatron_batched",
    "megatron_ring",
    "megatron_groups",
    "deepspeed_blocking",
    "deepspeed_objects",
    "ddp",
    "ddp_hooks",
    "fsdp2",
    "functional",
    "objects",
    "ranks_of_a_part",
    "tags",
    "forked_workers",
)


@pytest.mark.parametrize("check", CHECKS)
def test_check(place: Place, check: str) -> None:
    from tests.torch import framework_checks

    place.run(getattr(framework_checks, check))


def test_both_send_first(place: Place) -> None:
    from tests.torch import framework_checks

    place.run(framework_checks.both_send_first, 16 * MIB)


def test_a_mesh_has_a_backend_for_each_dimension(place: Place) -> None:
    from tests.torch import framework_checks

    place.run(framework_checks.mesh, place.backend, "gloo")


def test_hybrid_sharding_with_replicas_across_sites(place: Place) -> None:
    from tests.torch import framework_checks

    place.run(framework_checks.hsdp, place.backend, "gloo")
    place.run(framework_checks.hsdp, place.backend, place.backend)


def test_a_group_is_made_again_on_the_same_store(place: Place) -> None:
    from tests.torch import framework_checks

    # Each life takes a second or two of torch's own set-up; what a life leaves behind shows in the next one.
    place.run(framework_checks.lives, place.backend, 8, timeout_s=120.0)


def test_a_group_is_destroyed_with_operations_in_flight(place: Place) -> None:
    from tests.torch import framework_checks

    place.run(framework_checks.destroyed_in_flight, place.backend)
