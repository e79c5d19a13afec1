"""Training scripts that run across two sites.

- :mod:`.pipeline`: a GPT whose halves live at two sites, trained with torch's own schedules
- :mod:`.data_parallel`: DistributedDataParallel over the ranks of two sites
- :mod:`.train_two_sites`: the GPT's halves once more, 1F1B and the schedule that is chosen at run time, in turns

``proxyd example pipeline``, ``proxyd example data-parallel`` and ``proxyd example two-sites`` run them on an emulated
WAN, side by side with gloo. All run under plain ``torchrun``; in the first two one string says who carries the bytes.
:mod:`.gpt` is the model and the text, :mod:`.report` and :mod:`.two_sites_table` what is printed.
"""

from __future__ import annotations
