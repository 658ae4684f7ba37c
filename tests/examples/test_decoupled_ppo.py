"""The example, as its docstring says to run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "decoupled_ppo.py"


def test_decoupled_ppo_on_two_ranks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "old_log_prob equal" in line]
    assert len(lines) == 8
    away = [float(line.split()[-3]) for line in lines]
    assert [ratio > 0 for ratio in away] == [False, True, True, True] * 2  # pi_old was another policy by then
