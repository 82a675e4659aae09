"""A client's session with a server: connecting, heartbeats and calls over the attach socket."""
