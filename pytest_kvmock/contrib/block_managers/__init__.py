"""Fixtures of `pytest_kvmock.block_manager`: dynamo-llm's block managers in a test, and the fabric that they are in."""
