"""Session of a client with a server: connection, heartbeats and unary calls over sockets."""
