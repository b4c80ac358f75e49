"""The command line `weightledger`: the way in to `commands`."""

import gc


def main() -> None:
    """Run the command line; the entry point of the `weightledger` script."""
    # What an import makes stays until the process ends. Looking through all of it for garbage, while it is made and
    # once more at the end, would take a fifth of the time that a question takes.
    gc.disable()
    from weightledger.registry.commands.app import app

    gc.freeze()
    gc.enable()
    app()


if __name__ == "__main__":
    main()
