"""`python -m lorabatch` is the command `lorabatch`."""

from .cli import main

if __name__ == "__main__":
    main()
