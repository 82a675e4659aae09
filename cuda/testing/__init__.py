"""A device driver for tests, over host memory."""
