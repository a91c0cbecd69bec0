"""Programs that tests start."""

from pathlib import Path

import pytest
import scripts


def test_a_program_that_does_not_end_says_that_it_timed_out(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text("print('begun', flush=True)\nimport time\ntime.sleep(600)\n")
    with pytest.raises(TimeoutError, match=r"endless\.py timed out after 1 s"):
        scripts.run_script(script, cwd=tmp_path, limit_s=1)
