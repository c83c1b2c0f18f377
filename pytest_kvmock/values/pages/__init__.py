"""HTML pages from plain data: one file each, without network, server or build."""

from __future__ import annotations

from pytest_kvmock.values.pages.page import MOST_POINTS, MOST_REQUESTS, every, peaks, render, write_page

__all__ = ["MOST_POINTS", "MOST_REQUESTS", "every", "peaks", "render", "write_page"]
