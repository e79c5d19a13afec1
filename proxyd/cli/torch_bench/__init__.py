"""What the PyTorch benchmarks and examples share: two sites on the emulated WAN, with gloo and proxyd side by side.

:mod:`.sites` builds the place, :mod:`.worker` is one rank of a benchmark, :mod:`.pipeline`, :mod:`.allreduce` and
:mod:`.local` direct them. docs/pytorch.md says what is measured and how.

gloo and proxyd live in the *same* ranks: each way is a set of process groups of its own, and iterations take turns.
What changes from one way to the next is only who carries the bytes.
"""

from __future__ import annotations
