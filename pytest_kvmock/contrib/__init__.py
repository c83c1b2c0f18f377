"""What comes in through the public hooks and entry points, a folder each: fixtures, options and subcommands of its own.

The rest of the package imports nothing from here, and works without it. A folder that has a `plugin.py` is part of the plugin.
"""
