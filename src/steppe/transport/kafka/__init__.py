"""Kafka: client, segments, weights, board, dead-letter queue, and a broker for development."""
