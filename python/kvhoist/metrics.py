"""What the caches of this process do, for Prometheus: an exporter of its own, and a collector for `prometheus_client`.

>>> import urllib.request, kvhoist, kvhoist.metrics
>>> with kvhoist.metrics.serve(0) as server, kvhoist.Cache(block_bytes=4096, namespace="example") as cache:
...     cache.store(["a"], [bytes(4096)])
...     page = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics").read().decode()
[True]
>>> [line[line.index('tier'):] for line in page.splitlines() if line.startswith('kvhoist_resident_blocks{cache="example"')]
['tier="device"} 0', 'tier="host"} 1', 'tier="disk"} 0', 'tier="remote"} 0']

In a program that has metrics already, an engine above all, the collector puts these beside its own::

    import prometheus_client, kvhoist.metrics
    prometheus_client.REGISTRY.register(kvhoist.metrics.Collector())

All figures are read when they are asked for: one short lock of each cache, and a question to each NVMe drive. Counters begin at 0 when a cache
is opened. A cache has the labels ``cache``, its namespace, and ``number``, which tells caches of one namespace apart.
``docs/monitoring`` has a board for Grafana and rules for alerts.
"""

from __future__ import annotations

import http.server
import ipaddress
import os
import socket
import sys
import threading
import time
import weakref
from typing import Any, Iterable, Iterator, NamedTuple

from . import _native
from .cache import Cache, _opened
from .errors import Error

__all__ = ["Collector", "METRICS", "Metric", "Sample", "Server", "samples", "serve", "text"]

#: The type of what `text` returns.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    """One figure, with what it is of."""

    labels: dict[str, str]
    value: float
    #: What follows the metric's name: ``_bucket``, ``_sum`` and ``_count`` of a histogram.
    suffix: str = ""


class Metric(NamedTuple):
    """What is exported under one name."""

    name: str
    #: ``counter``, ``gauge`` or ``histogram``.
    kind: str
    help: str


#: All that is exported: the figures of a cache, and the wear of its drives.
METRICS: tuple[Metric, ...] = tuple(Metric(*each) for each in _native.metrics())

#: The metrics of drives, in the order of a drive's figures.
_OF_DRIVES = ("kvhoist_drive_used", "kvhoist_drive_written_bytes_total", "kvhoist_drive_years_left")


def _read(cache: Cache) -> Iterator[list[Sample]]:
    """Samples of each metric, in their order."""
    for all_ in cache.samples():
        yield [Sample(dict(labels), value, suffix) for suffix, labels, value in all_]
    drives = [(path, (used, written, left)) for path, used, written, left in cache.drives()]
    for at in (_OF_DRIVES.index(metric.name) for metric in METRICS if metric.name in _OF_DRIVES):
        found = ((path, figures[at]) for path, figures in drives)
        yield [Sample({"path": path}, float(figure)) for path, figure in found if figure is not None]


def samples(caches: list[Cache] | None = None) -> list[tuple[Metric, list[Sample]]]:
    """All metrics of these caches, or of all that are open in this process."""
    # In one step of the interpreter: another thread may open a cache meanwhile.
    opened = [(ref.key, ref()) for ref in _opened.valuerefs()]
    wanted = [(n, c) for n, c in opened if c is not None and (caches is None or any(c is each for each in caches))]
    found: list[tuple[Metric, list[Sample]]] = [(metric, []) for metric in METRICS]
    for number, cache in sorted(wanted, key=lambda each: each[0]):
        try:
            read = None if cache.closed else list(_read(cache))
        except Error:  # Inherited by a fork, or closed this moment.
            read = None
        if read is None:
            continue
        own = {"cache": cache.namespace, "number": str(number)}
        for (_, all_), new in zip(found, read, strict=True):
            all_.extend(each._replace(labels={**own, **each.labels}) for each in new)
    return found


def text(caches: list[Cache] | None = None) -> str:
    """All metrics in Prometheus's text format."""
    lines = []
    for metric, all_ in samples(caches):
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        for labels, value, suffix in all_:
            pairs = ",".join(f'{name}="{_escaped(label)}"' for name, label in labels.items())
            lines.append(f"{metric.name}{suffix}{{{pairs}}} {value:.17g}")
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class Collector:
    """A collector of `prometheus_client`: ``prometheus_client.REGISTRY.register(kvhoist.metrics.Collector())``."""

    def collect(self) -> Iterator[Any]:
        """The families of metrics, as the registry wants them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        makers = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        for metric, all_ in samples():
            family = makers[metric.kind](metric.name, metric.help)
            for labels, value, suffix in all_:
                family.add_sample(metric.name + suffix, labels, value)
            yield family

    def describe(self) -> list[Any]:
        """Nothing: the registry need not collect to learn the names."""
        return []


#: Connections that are served at a time, each by a thread.
_CONNECTIONS_MAX = 16
#: Seconds after which a connection is closed, wherever its one request and the answer are.
_EXCHANGE_S = 30.0
#: While others wait, the oldest connection is closed that has had so many seconds.
_GRACE_S = 1.0


#: Those of this process.
_listeners: weakref.WeakSet[_Listener] = weakref.WeakSet()


def _forked() -> None:
    """Closes what a child has inherited: it would keep the ports after the end of its parent, and answer nobody."""
    for listener in list(_listeners):
        listener.server_close()


os.register_at_fork(after_in_child=_forked)


class _Listener(http.server.ThreadingHTTPServer):
    """One request of each connection, at most so many of them, and none for ever."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], hosts: tuple[str, ...]) -> None:
        self.hosts = hosts
        #: When each one began, the oldest first.
        self._open: dict[socket.socket, float] = {}
        self._ended = threading.Condition()
        super().__init__(address, _Handler)
        _listeners.add(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._ended:
            while len(self._open) >= _CONNECTIONS_MAX:
                oldest, since = next(iter(self._open.items()))
                left = since + _GRACE_S - time.monotonic()
                if left <= 0:
                    # Nobody knows which one is to blame: the one that had the longest time.
                    self._end(oldest)
                else:
                    self._ended.wait(left)
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called by `serve_forever`, twice a second."""
        super().service_actions()
        with self._ended:
            overdue = time.monotonic() - _EXCHANGE_S
            for request in [request for request, since in self._open.items() if since <= overdue]:
                self._end(request)

    def _end(self, request: socket.socket) -> None:
        """Its thread finds it at its end, and closes it."""
        del self._open[request]
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The client was faster.

    def shutdown_request(self, request: Any) -> None:
        # Forgotten before it is closed: `_end` must not meet a descriptor that is another's by then.
        with self._ended:
            self._open.pop(request, None)
            self._ended.notify()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that hangs up is no fault.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Server:
    """An HTTP server with ``/metrics`` and ``/healthz``, on a thread of its own, until `close`. A context manager.

    ``/healthz`` answers 200, or 503 with the reasons while a tier of some cache is out of service or read-only.
    """

    def __init__(self, port: int, address: str, hosts: tuple[str, ...] = ()) -> None:
        self._server = _Listener((address, port), hosts)
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvhoist-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens: the one that was asked for, or the system's choice for 0."""
        return self._server.server_address[1]

    def close(self) -> None:
        """Stops listening. Again, or in a forked child, which never listens: does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def serve(port: int, address: str = "127.0.0.1", hosts: Iterable[str] = ()) -> Server:
    """Serves the metrics of this process at ``http://address:port/metrics``.

    There is no authentication, and namespaces and reasons are shown: listen where the scraper is, and nowhere else.
    Each rank of an engine is a process of its own and needs a port of its own. Requests for an IP address, for
    ``localhost`` and for the names in ``hosts`` are answered, those for other names refused: a page of another site could
    let its own name resolve to this address.

    Raises OSError where the address cannot be listened at.
    """
    return Server(port, address, tuple(hosts))


def _is_ours(host: str, hosts: tuple[str, ...]) -> bool:
    """Whether a request for this host, with or without a port, is answered."""
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            return False
    else:
        name = host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        return any(name.rstrip(".").lower() == own.rstrip(".").lower() for own in ("localhost", *hosts))


class _Handler(http.server.BaseHTTPRequestHandler):
    server_version = f"kvhoist/{_native.__version__}"
    # A client that sends nothing must not keep a thread.
    timeout = 10

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        assert isinstance(self.server, _Listener)
        # A request without a name is no browser's.
        other = next((name for name in self.headers.get_all("Host", []) if not _is_ours(name, self.server.hosts)), None)
        if other is not None:
            text_ = f"Host: found {other!r}, expected an IP address, localhost, or a name in `hosts`\n"
            self._answer(421, "text/plain; charset=utf-8", text_)
        elif path == "/metrics":
            self._answer(200, CONTENT_TYPE, text())
        elif path == "/healthz":
            ill = _ill()
            self._answer(503 if ill else 200, "text/plain; charset=utf-8", "\n".join(ill or ["ok"]) + "\n")
        else:
            self._answer(404, "text/plain; charset=utf-8", "found another path, expected /metrics or /healthz\n")

    def _answer(self, status: int, kind: str, body: str) -> None:
        content = body.encode("utf-8", "backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for each scrape tells nobody anything."""


def _ill() -> list[str]:
    ill = []
    for metric, all_ in samples():
        if metric.name in ("kvhoist_retired", "kvhoist_read_only"):
            what = metric.name.removeprefix("kvhoist_").replace("_", "-")
            ill += [f"{s.labels['cache']}: {s.labels['tier']} is {what}: {s.labels['reason']}" for s in all_ if s.value]
    return ill
