"""Using the package imports neither the compiler, which takes longer than everything else together, nor a framework."""

from __future__ import annotations

import subprocess
import sys

import pytest

USE = {
    "subpackages, which are attributes": """
assert "fullrank.data" not in sys.modules
assert fullrank.data.until_all_end
assert fullrank.integrations.__doc__
assert "torchmetrics" not in sys.modules
""",
    "norm": """
parameter = torch.nn.Parameter(torch.zeros(2))
parameter.grad = torch.tensor([3.0, 4.0])
assert fullrank.clip_grad_norm_([parameter], 1.0) == 5.0
""",
    "loss": """
logits = torch.linspace(-1, 1, 20)[:, None].requires_grad_()
loss = fullrank.SmoothAPLoss(num_classes=1)(logits, (torch.arange(20) % 4 == 0).long())
loss.backward()
assert logits.grad.abs().sum() > 0
""",
    "integrations": """
import fullrank.data, fullrank.integrations.transformers, fullrank.integrations.sentence_transformers
frameworks = {"pytorch_lightning", "lightning", "accelerate", "transformers", "sentence_transformers"}
assert frameworks.isdisjoint(sys.modules)
""",
    "retrieval": """
embeddings = torch.eye(4).requires_grad_()
fullrank.RetrievalSmoothAPLoss()(embeddings, torch.tensor([0, 0, 1, 1])).backward()
assert embeddings.grad is not None
assert "sympy" not in sys.modules  # which torch imports for a backward with an incoming gradient
""",
}
# The control: after it, the compiler must be found.
COMPILE = "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1))"


@pytest.mark.slow
def test_using_the_package_does_not_import_the_compiler() -> None:
    """A new process imports fullrank and uses it, then it compiles."""
    parts = ["import sys, torch, fullrank"]
    for code in ("\n".join(USE.values()), COMPILE):
        parts += [code, "print('torch._dynamo' in sys.modules)"]
    command = [sys.executable, "-W", "ignore", "-c", "\n".join(parts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["False", "True"]


@pytest.mark.slow
def test_a_function_that_is_not_compiled_runs_eagerly_in_a_compiled_one() -> None:
    import torch

    from fullrank.distributed.torch_private import not_compiled

    compiling = []

    @not_compiled
    def inner(x: torch.Tensor, *, factor: float) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x * factor

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x + 1, factor=3.0) - 1

    compiled = torch.compile(outer, backend="eager")
    for length in (2, 3, 2):
        assert torch.equal(compiled(torch.ones(length)), torch.full((length,), 5.0))
    assert compiling == [False] * 3  # eager in every call, not only while a graph is traced
    with pytest.raises(RuntimeError):
        torch.compile(lambda x: inner(x, factor=2.0), backend="eager", fullgraph=True)(torch.ones(2))
