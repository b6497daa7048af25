"""Control of runs: every operation is defined once (service.py); REST, MCP and the command line only translate."""
