"""A few lines of glue for training frameworks; a module per framework, imported by its name.

``fullrank.integrations.lightning`` and ``fullrank.integrations.transformers``. docs/integrations.md has recipes for
them, and for Accelerate, torchmetrics and plain torch, which need no glue.
"""
