"""What ``proxyd bench link`` and ``proxyd bench ways`` are made of.

:mod:`.scenario` (what link, who sends), :mod:`.backlog` (senders that always have something to send), :mod:`.watch`
(what the coordinator thinks of the link meanwhile), :mod:`.figures` (pure: from what was seen to figures), :mod:`.run`
(one mode on one link), :mod:`.ways` (two directions, far coordinators, urgent messages),
:mod:`.picture` and :mod:`.table`.
"""
