"""What an agent tells about a message under way: its phase to the trainer, its arrival to the receiving agent."""

from __future__ import annotations

from proxyd.core.effects import AgentEffect, TellSendState, ToPeer
from proxyd.core.linkbook import NANOS, LinkBook
from proxyd.core.transfer import PHASES, Outgoing
from proxyd.wire import peer as wire
from proxyd.wire.client import SendPhase

LEAST_MOVE_NS = 5_000_000
MOVE_SHARE = 8
"""A prediction is told anew when it moved by 5 ms and an eighth of what is left: a frame of 80 bytes per slot at most,
where TCP falls behind the pace all the time."""


class Telling:
    """Appends to ``effects``."""

    def __init__(self, effects: list[AgentEffect]) -> None:
        self._effects = effects

    def state(self, out: Outgoing, finish_in_ns: int) -> None:
        """Tell the trainer when its message enters another phase (a timeout names it), or has a prediction."""
        if out.padding:
            return
        phase = PHASES[out.state]
        if phase is SendPhase.SENDING and out.taken_bytes == 0 and not out.free:
            phase = SendPhase.GRANTED
        if phase is out.told_phase and not finish_in_ns:
            return
        if out.orphaned_until_ns:
            return
        out.told_phase = phase
        bytes_done = min(out.nbytes, out.taken_bytes)
        self._effects.append(TellSendState(out.envelope.source, out.transfer, phase, bytes_done, finish_in_ns))

    def predict(
        self, out: Outgoing, book: LinkBook, start_in_ns: int, before_bytes: int, rate_bytes_per_s: int, now_ns: int
    ) -> None:
        """Tell receiver and trainer when it will be there, should it go on at this rate.

        :param start_in_ns: when its newest grant begins.
        :param before_bytes: what it holds of earlier grants: that leaves before, behind what the kernel has.
        """
        rate = max(1, rate_bytes_per_s)
        kernel_bytes = book.backlog_bytes() - book.untaken_bytes
        start_in_ns = max(start_in_ns, (kernel_bytes + before_bytes) * NANOS // rate)
        leaves_in_ns = start_in_ns + book.lasts_ns(out.peer, out.untaken_bytes - before_bytes, rate)
        self.expect(out, leaves_in_ns, book.one_way_ns, now_ns)
        self.state(out, leaves_in_ns + book.one_way_ns)

    def expect(self, out: Outgoing, leaves_in_ns: int, one_way_ns: int, now_ns: int) -> None:
        """Predict the arrival in-band, when the prediction moved by more than an eighth of what is left (or 5 ms).

        The receiver counts from when it hears of it. That is one way later, and so is the arrival of what leaves then.
        """
        if out.padding:
            return
        finish_in_ns = leaves_in_ns + one_way_ns
        finish_ns = now_ns + finish_in_ns
        moved_ns = abs(finish_ns - out.expected_finish_ns)
        if out.peer is None or (out.expected_finish_ns and moved_ns < max(LEAST_MOVE_NS, finish_in_ns // MOVE_SHARE)):
            return
        out.expected_finish_ns = finish_ns
        frame = wire.Expect(out.nbytes, leaves_in_ns, max(5_000_000, leaves_in_ns // 4))
        self._effects.append(ToPeer(out.peer, False, out.transfer, frame))
