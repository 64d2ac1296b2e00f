"""Whose rules the dialects follow: the engines, in the versions that were read."""

from __future__ import annotations

READ = {"vllm": "vLLM 0.32.0", "sglang": "SGLang 0.5.23"}
