"""Kafka: client, segments, weights, board, and a broker for development."""
