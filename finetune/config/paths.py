"""Folders of the installed package."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
ASSETS = PACKAGE / "assets"
"""Data alone: shapes of models, tables of GPUs, the packaged model, rows and tasks."""
