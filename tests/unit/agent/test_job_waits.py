"""What trainers say of their waits, by job: believed as far as it can be true, gone when they are."""

from __future__ import annotations

from proxyd.agent.job_waits import MAX_JOBS, JobWaits


class Clock:
    now_ns = 1000

    def __call__(self) -> int:
        return self.now_ns


def test_a_jobs_trainers_add_up_and_go_together() -> None:
    clock = Clock()
    waits = JobWaits(clock)
    waits.joined("one", 1, 0)
    waits.joined("one", 2, 0)
    waits.joined("two", 3, 0)
    clock.now_ns += 100
    waits.waited("one", 1, 60)
    waits.waited("one", 2, 30)
    assert waits.all() == [("one", 2, 90), ("two", 1, 0)]
    waits.left("one", 1)
    assert waits.all() == [("one", 1, 90), ("two", 1, 0)], "what its trainers waited stays as long as one of them does"
    waits.left("one", 2)
    assert waits.all() == [("two", 1, 0)]
    waits.joined("one", 4, 0)
    assert waits.all()[0] == ("one", 1, 0)


def test_nobody_waited_longer_than_it_lived() -> None:
    clock = Clock()
    waits = JobWaits(clock)
    waits.joined("job", 1, 500)
    waits.waited("job", 1, 1 << 63)
    assert waits.all() == [("job", 1, 500)], "what it lived with an earlier life of the agent"
    clock.now_ns += 100
    waits.waited("job", 1, 40)
    waits.waited("job", 1, 1 << 63)
    assert waits.all() == [("job", 1, 600)]


def test_names_that_somebody_invents_end_up_in_one_series() -> None:
    waits = JobWaits(Clock())
    for number in range(10 * MAX_JOBS):
        waits.joined(f"job-{number}", number, 7)
        waits.waited(f"job-{number}", number, 7)
    found = waits.all()
    assert len(found) == MAX_JOBS + 1
    assert sum(count for _, count, _ in found) == 10 * MAX_JOBS
    assert sum(waited_ns for _, _, waited_ns in found) == 70 * MAX_JOBS
    for number in range(10 * MAX_JOBS):
        waits.left(f"job-{number}", number)
    assert waits.all() == []
