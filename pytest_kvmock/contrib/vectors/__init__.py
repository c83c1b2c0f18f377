"""Vectors for tests in other languages: events in every dialect, with the answers of an index; and the command that
writes them.
"""

from pytest_kvmock.contrib.vectors.vectors import write_vectors

__all__ = ["write_vectors"]
