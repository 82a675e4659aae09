"""What all RPC entrances share: sessions, request checks, error mapping, sockets."""
