"""The matcher, against what a person would say."""

from __future__ import annotations

from proxyd.wire.envelope import Envelope, TransferId
from proxyd_client.matching import Incoming, Matcher, Posted


def message(src: int, tag: int = 1, group: str = "", sequence: int = 1, dtype: str = "uint8") -> Incoming:
    return Incoming(TransferId(src + 100, sequence), Envelope("job", src, 9, group, tag, 0, 4, dtype, (4,)))


def receive(src: int | None, tag: int = 1, group: str = "", only: str = "") -> Posted:
    return Posted(src, group, tag, lambda envelope: f"not {only}" if only and envelope.dtype != only else "")


def test_channels_are_told_apart_by_source_tag_and_group() -> None:
    matcher = Matcher()
    offered = [message(0), message(1), message(0, tag=2), message(0, group="g")]
    for one in offered:
        assert not matcher.offer(one).matched
    for posted, expected in (
        (receive(0, group="g"), offered[3]),
        (receive(0, tag=2), offered[2]),
        (receive(1), offered[1]),
        (receive(0), offered[0]),
    ):
        assert matcher.post(posted).matched == [(posted, expected)]
    assert not matcher.post(receive(0)).matched


def test_a_message_meets_the_receive_posted_first_specific_or_not() -> None:
    matcher = Matcher()
    specific, anyone = receive(0), receive(None)
    matcher.post(anyone)
    matcher.post(specific)
    first, second = message(0, sequence=1), message(0, sequence=2)
    assert matcher.offer(first).matched == [(anyone, first)]
    assert matcher.offer(second).matched == [(specific, second)]


def test_a_misfit_fails_the_receive_and_keeps_its_place_before_later_messages() -> None:
    matcher = Matcher()
    first, second = message(0, sequence=1, dtype="int8"), message(0, sequence=2)
    picky, patient = receive(0, only="uint8"), receive(0)
    matcher.post(picky)
    outcome = matcher.offer(first)
    assert [(r, m) for r, m, _ in outcome.misfits] == [(picky, first)]
    matcher.offer(second)
    assert len(matcher.post(receive(0, only="uint8")).misfits) == 1
    assert matcher.post(patient).matched == [(patient, first)]
    assert matcher.post(picky).matched == [(picky, second)]


def test_a_misfit_goes_on_to_the_next_receive_that_waits() -> None:
    matcher = Matcher()
    picky, patient = receive(0, only="uint8"), receive(0)
    matcher.post(picky)
    matcher.post(patient)
    odd = message(0, dtype="int8")
    outcome = matcher.offer(odd)
    assert [r for r, _, _ in outcome.misfits] == [picky]
    assert outcome.matched == [(patient, odd)]


def test_withdrawn_receives_return_their_messages_to_their_places() -> None:
    matcher = Matcher()
    messages = [message(0, sequence=n) for n in range(1, 5)]
    receives = [receive(0) for _ in range(3)]
    for one in receives:
        matcher.post(one)
    for one in messages:
        matcher.offer(one)
    matcher.withdraw(receives[0])
    matcher.withdraw(receives[2])
    matcher.withdraw(receives[1])
    again = [receive(0) for _ in range(4)]
    assert [matcher.post(one).matched[0][1] for one in again] == messages


def test_a_withdrawn_receive_hands_its_message_to_one_that_waits() -> None:
    matcher = Matcher()
    first, second = receive(0), receive(0)
    matcher.post(first)
    matcher.post(second)
    one = message(0)
    matcher.offer(one)
    assert matcher.withdraw(first).matched == [(second, one)]
    assert not matcher.withdraw(receive(0)).matched  # never posted


def test_a_retracted_message_puts_its_receive_back_in_its_old_place() -> None:
    matcher = Matcher()
    early, late = receive(0), receive(0)
    matcher.post(early)
    matcher.post(late)
    gone, next_one = message(0, sequence=1), message(0, sequence=2)
    matcher.offer(gone)
    assert not matcher.retract(gone).matched
    assert matcher.offer(next_one).matched == [(early, next_one)]
    queued = message(1)
    matcher.offer(queued)
    matcher.retract(queued)
    assert not list(matcher.queued(None, "", 1))
    assert matcher.all_waiting() == [late]


def test_a_failed_message_takes_its_turn_whatever_the_buffer() -> None:
    matcher = Matcher()
    failed = message(0, dtype="int8")
    matcher.offer(failed)
    failed.failed = 4, "lost", 0
    picky = receive(0, only="uint8")
    assert matcher.post(picky).matched == [(picky, failed)]


def test_what_waits_for_a_source_and_what_waits_elsewhere() -> None:
    matcher = Matcher()
    specific, anyone = receive(0), receive(None, tag=2)
    matcher.post(specific)
    matcher.post(anyone)
    matcher.offer(message(3, tag=8))
    assert matcher.waiting_for(0) == [specific]
    assert [envelope.tag for envelope in matcher.queued_elsewhere(3, "", 1)] == [8]
    assert not matcher.queued_elsewhere(0, "", 1)


def test_finished_unties_both() -> None:
    matcher = Matcher()
    posted, one = receive(0), message(0)
    matcher.offer(one)
    matcher.post(posted)
    matcher.finished(one)
    assert posted.incoming is None
    assert one.receive is None
