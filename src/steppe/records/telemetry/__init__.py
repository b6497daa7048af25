"""What monitoring reads: Prometheus metrics, OpenTelemetry spans, a role's HTTP endpoint."""
