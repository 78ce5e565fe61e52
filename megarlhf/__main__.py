"""`python -m megarlhf` and `torchrun -m megarlhf`."""

import sys

from megarlhf.cli import main

if __name__ == "__main__":
    sys.exit(main())
