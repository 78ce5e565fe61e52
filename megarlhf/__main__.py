"""`python -m megarlhf` and `torchrun -m megarlhf`."""

from megarlhf.cli import run

if __name__ == "__main__":
    run()
