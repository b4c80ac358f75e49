"""`python -m weightledger` is the command line `weightledger`."""

from weightledger.registry.cli import main

if __name__ == "__main__":
    main()
