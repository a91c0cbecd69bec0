"""Check the installed wheel: its library in C is found and used, and README's first blocks print what README says.

Where torch has no wheel, as on musl, the library alone is called.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def call_library() -> None:
    """Compute an average precision of 5/6 with the library, without torch."""
    (path,) = (file.locate() for file in importlib.metadata.files("fullrank") or () if file.name == "sums.library")
    scores, positive = (ctypes.c_float * 3)(3, 2, 1), (ctypes.c_bool * 3)(True, False, True)
    loss, valid = ctypes.c_double(), ctypes.c_bool()
    numbers = [ctypes.c_int64(number) for number in (0, 1, 3)]
    out = ctypes.byref(loss), ctypes.byref(valid), None
    function = ctypes.CDLL(str(path)).smooth_ap_float32
    assert function(scores, positive, None, None, None, *numbers, ctypes.c_double(0.01), *out) == 1
    assert valid
    assert abs(loss.value - 1 / 6) < 1e-6, loss.value


def take_step() -> None:
    """Take a step with a loss, which must call the library."""
    import torch

    import fullrank
    from fullrank.kernels import native

    assert not Path(fullrank.__file__).samefile(README.with_name("__init__.py")), "this is the checkout"
    assert fullrank.__config__ == {"kernels": "native"}, fullrank.__config__
    calls = []
    functions = native.FUNCTIONS[torch.float32]
    for name, function in functions.items():
        functions[name] = lambda *given, name=name, function=function: calls.append(name) or function(*given)
    logits = torch.tensor([[3.0], [2.0], [1.0]], requires_grad=True)
    fullrank.SmoothAPLoss(num_classes=1)(logits, torch.tensor([1, 0, 1])).backward()
    assert calls, "torch has computed the step"
    assert logits.grad is not None
    assert logits.grad.abs().sum() > 0


def run_readme() -> None:
    """Run the blocks of README that print, and compare what they print: programs of a shell block, and Python."""
    blocks = re.findall(
        r"```(sh|python)\n((?:(?!```).)*)```\n\n```text\n(.*?)```", README.read_text("utf-8"), re.DOTALL
    )
    assert {language for language, _, _ in blocks} == {"sh", "python"}
    for language, code, expected in blocks:
        if language == "sh":
            programs = re.findall(r"^python (.*?) *(?:#.*)?$", code, re.MULTILINE)
        else:
            programs = [f"-c {shlex.quote(code)}"]
        outputs = [
            subprocess.run([sys.executable, *shlex.split(given)], stdout=subprocess.PIPE, text=True, check=True).stdout
            for given in programs
        ]
        print("".join(outputs), end="")
        assert "".join(outputs).split() == expected.split()


if __name__ == "__main__":
    call_library()
    if importlib.util.find_spec("torch") is not None:
        take_step()
        run_readme()
    print(f"fullrank {importlib.metadata.version('fullrank')}: the wheel works")
