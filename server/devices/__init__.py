"""Device copies: the server decides, and one copy worker process per device copies."""
