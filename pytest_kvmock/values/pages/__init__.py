"""Pages that people look at: plain data in, one HTML file out that needs no network, no server and no build."""

from __future__ import annotations

from pytest_kvmock.values.pages.page import MOST_POINTS, MOST_REQUESTS, every, peaks, render, write_page

__all__ = ["MOST_POINTS", "MOST_REQUESTS", "every", "peaks", "render", "write_page"]
