"""`python -m saltflat`: the command line."""

from saltflat.cli import main

if __name__ == "__main__":
    main()
