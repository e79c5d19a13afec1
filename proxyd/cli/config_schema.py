"""``proxyd config schema``: the JSON schema of the configuration file, for editors and for checks in a pipeline.

A schema can't say everything: what depends on several keys, and the forms of rates and addresses, are judged by
``proxyd config check``. What that accepts, the schema accepts.
"""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None but --help."""


def run(args: argparse.Namespace) -> int:
    from proxyd.runtime.config import config_schema

    print(json.dumps(config_schema(), indent=2))
    return 0
