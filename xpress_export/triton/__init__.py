"""Bundles as models of the Triton Inference Server."""

from __future__ import annotations

from xpress_export.triton.repository import Packaged, PackageOptions, write_model

__all__ = ["PackageOptions", "Packaged", "write_model"]
