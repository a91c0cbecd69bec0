"""Memory of past rows, the same on every rank."""

from .memory_queue import MemoryQueue, QueueRows

__all__ = ["MemoryQueue", "QueueRows"]
