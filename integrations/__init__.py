"""A few lines of glue for training frameworks, in one module per framework. Import the module by its name.

The modules are ``fullrank.integrations.lightning``, ``fullrank.integrations.transformers``,
``fullrank.integrations.sentence_transformers`` and ``fullrank.integrations.sklearn``. docs/recipes has a page for the
first three, and for Accelerate and plain torch, which need no glue.
"""
