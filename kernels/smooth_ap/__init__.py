"""The kernel of Smooth-AP; which form it takes is chosen in one place, sums.py."""
