"""Programs of requests: operations as values (`operations.py`), run on a harness (`interpreter.py`), and written as
Python (`python.py`).
"""
