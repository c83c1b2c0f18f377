"""Subjects added through the public hooks and entry points, a folder each, with its fixtures, options and subcommands.

The rest of the package imports nothing from here, and works without it. A folder that has a `plugin.py` is part of the
plugin.
"""
