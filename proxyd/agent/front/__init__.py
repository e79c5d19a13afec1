"""``[agent] workers`` above 1: one process that accepts and answers for all, and its worker processes.

The *front* (:mod:`.daemon`) has the listeners, the admin socket, the metrics and the signals. Each *worker*
(:mod:`.worker`) is an agent like any other, with a name, memory, peer connections and control sessions of its own.
"""
