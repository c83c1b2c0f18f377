"""A program of requests: operations as values (`operations.py`), done on a harness (`interpreter.py`), and as Python
(`python.py`).
"""
