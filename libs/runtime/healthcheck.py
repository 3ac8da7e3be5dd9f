"""`python -m libs.runtime.healthcheck URL`: exit with 0 if a service serves, for containers' health checks.

http://HOST:PORT/PATH must answer 200; grpc://HOST:PORT must answer SERVING to gRPC's health protocol, over the TLS
that the environment names.
"""

import sys
from http.client import HTTPConnection, HTTPException
from urllib.parse import SplitResult, urlsplit

TIMEOUT_S = 4.0


def http_serves(url: SplitResult) -> bool:
    connection = HTTPConnection(url.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("GET", url.path or "/")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def grpc_serves(address: str) -> bool:
    # Each of these imports takes longer than a whole check over HTTP.
    import asyncio  # noqa: PLC0415

    from grpc.aio import AioRpcError  # noqa: PLC0415
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415

    from libs.runtime.net.rpc import make_channel  # noqa: PLC0415
    from libs.runtime.settings import CommonSettings, load_settings  # noqa: PLC0415

    class ProbeSettings(CommonSettings):
        tls_role = "worker"  # the probe runs in workers' containers; health is served to any role

    async def check() -> bool:
        async with make_channel(load_settings(ProbeSettings), address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            except AioRpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return asyncio.run(check())


def main(url: str) -> int:
    """Return exit code 0 if the URL serves, 1 if not."""
    parts = urlsplit(url)
    serves = grpc_serves(parts.netloc) if parts.scheme == "grpc" else http_serves(parts)
    return 0 if serves else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
