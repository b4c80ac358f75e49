"""The command line `weightledger`: the way in to `commands`."""

import contextlib
import gc
import os
import sys


def main() -> None:
    """Run the command line; the entry point of the `weightledger` script."""
    # What an import makes stays until the process ends. Looking through all of it for garbage, while it is made and
    # once more at the end, would take a fifth of the time that a question takes.
    gc.disable()
    from weightledger.registry.commands.app import app

    gc.freeze()
    gc.enable()
    try:
        app()
    except OSError as error:
        # What the library refuses is told where the command runs; this is what could not be printed.
        _lose_output()
        with contextlib.suppress(OSError, AttributeError):
            sys.stderr.write(f"error: the answer could not be written: {error}\n")
            sys.stderr.flush()
        sys.exit(1)


def _lose_output() -> None:
    # At its end the interpreter writes what is left in the buffer, and would fail once more.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError, ValueError):
            stream.flush()
            continue
        with contextlib.suppress(OSError, AttributeError, ValueError):
            os.dup2(nowhere, stream.fileno())


if __name__ == "__main__":
    main()
