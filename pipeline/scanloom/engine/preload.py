"""Preloaded by Dask's workers: they die with the process that started them."""

from __future__ import annotations

from scanloom.engine.child import die_with_parent

die_with_parent()
