"""What people watch kvtier by: Grafana's screens, made by code, and Prometheus' rules."""
