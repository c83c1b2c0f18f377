"""Extensions through the public hooks and entry points, one folder each, with fixtures, options and subcommands.

The rest of the package imports nothing from here, and works without it. A folder with a `plugin.py` is part of the
plugin.
"""
