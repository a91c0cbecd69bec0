"""The kernel of Smooth-AP. sums.py chooses its form; the other files compute one or two forms each."""
