"""``python -m fullrank``: check that the gradients are exact on this machine, or on this cluster under torchrun."""

from . import __version__
from .preflight.command import main

if __name__ == "__main__":
    raise SystemExit(main(__version__))
