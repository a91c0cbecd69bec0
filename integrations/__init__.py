"""A few lines of glue for training frameworks, in one module per framework. Import the module by its name.

The modules are ``fullrank.integrations.lightning``, ``fullrank.integrations.transformers`` and
``fullrank.integrations.sentence_transformers``. docs/recipes has a page for each, and for Accelerate and plain torch,
which need no glue.
"""
