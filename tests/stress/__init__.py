"""`make stress`: clients that are killed, a server that is killed, and a verdict on what they did to the bytes meanwhile."""
