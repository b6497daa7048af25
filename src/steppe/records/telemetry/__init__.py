"""Data for monitoring: Prometheus metrics, OpenTelemetry spans, a role's HTTP endpoint."""
