"""Moving bytes to and from devices: the server's side decides, a process per device moves."""
