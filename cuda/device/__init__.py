"""Device memory of engines: drivers, exported allocations, layouts and copies."""
