"""`python -m baechi`: the command line."""

from baechi.cli.commands import main

if __name__ == "__main__":
    main()
