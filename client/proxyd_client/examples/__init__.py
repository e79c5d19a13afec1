"""Two training scripts that run across two sites, each with one string to change.

- :mod:`.pipeline`: a GPT whose halves live at two sites, trained with torch's own schedules
- :mod:`.data_parallel`: DistributedDataParallel over the ranks of two sites

``proxyd example pipeline`` and ``proxyd example data-parallel`` run them on an emulated WAN, side by side with gloo.
Both run under plain ``torchrun``, with ``--backend gloo`` as well. :mod:`.gpt` is the model and the text,
:mod:`.report` what is printed.
"""

from __future__ import annotations
