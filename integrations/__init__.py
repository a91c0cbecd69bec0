"""A few lines of glue for training frameworks, in one module per framework. Import the module by its name.

The modules are ``fullrank.integrations.lightning`` and ``fullrank.integrations.transformers``. docs/integrations.md has
recipes for both, and for Accelerate, torchmetrics and plain torch, which need no glue.
"""
