"""The container's health check: find out whether the server on this machine answers /health.

python -m xgpt.health     # the port in XGPT_PORT, or 8000; XGPT_SCHEME=https for TLS; exit code 0 or 1
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys


def main() -> int:
    address, port = "127.0.0.1", int(os.environ.get("XGPT_PORT", "8000"))
    connection = http.client.HTTPConnection(address, port, timeout=4)
    if os.environ.get("XGPT_SCHEME") == "https":
        # The certificate is for the clients' host name, and nothing outside this container can answer here.
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(address, port, timeout=4, context=context)
    try:
        connection.request("GET", "/health")
        return 0 if connection.getresponse().status == http.HTTPStatus.OK else 1
    except (OSError, http.client.HTTPException) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
