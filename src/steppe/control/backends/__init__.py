"""Where runs of a service are carried out: processes elsewhere, Kubernetes, Kafka."""
