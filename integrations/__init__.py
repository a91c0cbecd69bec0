"""A few lines of glue for training frameworks, one module each, such as ``fullrank.integrations.lightning``."""
