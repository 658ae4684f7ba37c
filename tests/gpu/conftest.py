"""Repeatable arithmetic, so that a model and its twin can be compared bit for bit."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
