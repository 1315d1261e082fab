"""Checks: relations that must hold, by what they are about; reasons in checks.toml."""

from pathlib import Path

from equipoise.judging.checks.registry import CHECKS, Check, declare

declare(Path(__file__).with_name("checks.toml"))

__all__ = ["CHECKS", "Check"]
