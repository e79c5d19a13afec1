"""The daemons' own machines in a world that breaks: crashes, cuts, partitions, stopped processes, damaged frames.

:mod:`proxyd.sim` asks how fast; this asks whether anything is lost. So its network is simple (connections that keep
order, with a delay and a rate), and its faults are many. A seed draws a small world, which faults it has and how often
(:mod:`~proxyd.sim.faults.plan`); what must hold is looked at after every event
(:mod:`~proxyd.sim.faults.invariants`). When the faults are over everything must heal.

``proxyd simulate faults --seed N`` plays one seed; nothing but the seed decides what happens.
"""
