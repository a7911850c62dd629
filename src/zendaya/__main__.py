"""`python -m zendaya`, and so `torchrun -m zendaya train …`."""

from zendaya.cli import main

if __name__ == "__main__":
    main()
