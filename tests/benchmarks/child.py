"""Measures one row in this process: `python -m tests.benchmarks.child ROW SETTING OUT`."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path

from tests.benchmarks.catalog import BY_NAME
from tests.benchmarks.setting import Setting


def main(name: str, setting: str, out: str) -> None:
    """Append one line of JSON to OUT for each result, as soon as there is one."""
    # TorchRL's own updater calls TorchRL's own collectors in a way that TorchRL warns of, once a push.
    warnings.simplefilter("ignore", DeprecationWarning)
    module, function = BY_NAME[name].measure.split(":")
    measure = getattr(importlib.import_module(f"tests.benchmarks.rows.{module}"), function)
    with Path(out).open("a", encoding="utf-8") as file:
        for result in measure(Setting(**json.loads(setting))):
            file.write(json.dumps(result.to_dict()) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
