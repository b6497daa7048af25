"""Backends that execute the runs of a service: external processes, Kubernetes, Kafka."""
