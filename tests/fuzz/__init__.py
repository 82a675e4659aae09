"""`make fuzz`: whatever bytes come to the server, by whichever door, it answers cleanly, in time, and keeps nothing of them."""
