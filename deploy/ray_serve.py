"""A Ray Serve application: several replicas of a bundle behind the HTTP API of ``xpress-export serve``.

Every replica is a process with a session and a web application of its own, and the cores or the GPU that Ray gives it. A router in front
holds no model: it passes requests on, and where a replica dies before any of its answer was sent it asks another one.

    serve run deploy.ray_serve:build bundle=my-bundle replicas=2 slots=4 cores=1
    python -m deploy.ray_serve bundle=my-bundle replicas=2 port=8000
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

try:
    import ray
    from ray import serve
    from ray.serve import Application
except ModuleNotFoundError as problem:
    sys.exit(f"ray_serve: {problem.name} is not installed; install it with: pip install 'xpress-export[serve,ray]'")

from deploy.ray_arguments import Arguments
from deploy.ray_replica import TIME_TO_LEAVE, Replica
from deploy.ray_router import Router
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import OptionError, XpressError

_NAME = "xpress"


def build(given: dict[str, Any]) -> Application:
    """The application, as ``serve run`` asks for it. ``given``: see :class:`Arguments`.

    The bundle lies at the same path on every machine of the cluster. Raises OptionError and BundleError.
    """
    arguments = Arguments.read(given)
    bundle = Bundle.open(arguments.bundle)
    slots = arguments.slots or bundle.manifest.batch
    # Workers have a working directory of their own.
    places = {name: str(Path(path).absolute()) for name in ("bundle", "api_key_file") if (path := getattr(arguments, name)) is not None}
    settled = arguments.model_copy(update={**places, "slots": slots})
    room = slots + arguments.max_queue
    replica = serve.deployment(
        name="Replica",
        num_replicas=arguments.replicas,
        max_ongoing_requests=room,
        max_queued_requests=arguments.max_waiting,
        ray_actor_options={"num_cpus": arguments.cores, "num_gpus": arguments.gpus},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=arguments.drain_seconds + TIME_TO_LEAVE,
    )(Replica)
    router = serve.deployment(
        name="Router",
        num_replicas=arguments.routers,
        # What waits for a replica waits in the router.
        max_ongoing_requests=room * arguments.replicas + 2 * arguments.max_waiting,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=arguments.drain_seconds + 2 * TIME_TO_LEAVE,
    )(Router)
    return router.bind(replica.bind(settled.model_dump()), arguments.retries, arguments.max_body)


def main(given: list[str]) -> int:
    """Start Ray here, or join the cluster of RAY_ADDRESS, and serve until Ctrl-C or SIGTERM; then finish what runs."""
    try:
        pairs = dict(_pair(word) for word in given)
        host, port = pairs.pop("host", "127.0.0.1"), pairs.pop("port", "8000")
        if not port.isdecimal():
            raise OptionError(f"argument 'port' is {port!r}, expected a number")
        application = build(pairs)
        drain_seconds = Arguments.read(pairs).drain_seconds
    except XpressError as problem:
        print(f"ray_serve: {problem}", file=sys.stderr)  # noqa: T201
        return problem.exit_code
    ray.init(include_dashboard=False)
    # After Ray, which sets one of its own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve.start(http_options={"host": host, "port": int(port)})
        serve.run(application, name=_NAME, blocking=True)
    except KeyboardInterrupt:
        # A second one ends it at once.
        serve.get_app_handle(_NAME).broadcast("drain", drain_seconds).results()
        serve.delete(_NAME)
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
    return 0


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise OptionError(f"argument {word!r} is not of the form name=value")
    return name, value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
