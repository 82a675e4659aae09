"""Parts shared by gRPC and socket calls: sessions, request checks, error mapping, sockets."""
