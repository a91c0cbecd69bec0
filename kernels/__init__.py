"""The numerics: pure functions of tensors that know no targets, ranks or modules."""
