"""`make fuzz`: the server answers arbitrary bytes cleanly and in time, and keeps nothing."""
