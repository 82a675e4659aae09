"""Stand-in for the package `mooncake`, for tests without it. See `harness.mooncake_master`."""
