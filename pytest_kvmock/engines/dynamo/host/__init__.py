"""The host memory below Dynamo's block manager, and its time."""
