"""MCP: operations as tools, runs as resources."""
