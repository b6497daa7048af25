"""`python healthy.py PORT`: exit code 0 if /healthz answers there. For HEALTHCHECK; a slim image has no curl."""

import sys
import urllib.request

with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/healthz", timeout=4) as answer:
    sys.exit(0 if answer.status == 200 else 1)
