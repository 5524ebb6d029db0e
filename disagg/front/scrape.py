"""Reading a gateway's /metrics and /ready over HTTP, and what two looks at counters and histograms say of the time between."""

from __future__ import annotations

import math
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from disagg.errors import AccessError, ConfigError, GatewayUnreachableError
from disagg.front.ops import METRICS, READY

Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """One look. `at_s`: monotonic. `samples`: by name and labels. `obstacle`: why the gateway is not ready; None when it is."""

    at_s: float
    samples: dict[Key, float]
    obstacle: str | None = None

    def labels(self, name: str) -> list[dict[str, str]]:
        """The label sets of one metric."""
        return [dict(labels) for known, labels in self.samples if known == name]

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples that have these labels; 0 when there is none."""
        wanted = set(labels.items())
        return sum(value for (known, own), value in self.samples.items() if known == name and wanted <= own)

    def rate(self, before: Scrape, name: str, **labels: str) -> float:
        """Growth of a counter per second. After a restart of the gateway, since that."""
        seconds = self.at_s - before.at_s
        if seconds <= 0:
            return 0.0
        was, is_now = before.value(name, **labels), self.value(name, **labels)
        return (is_now - was if is_now >= was else is_now) / seconds

    def quantile(self, before: Scrape, name: str, q: float, **labels: str) -> float | None:
        """The q-quantile of what a histogram took in between, by interpolation inside a bucket; None when it took in nothing."""
        bounds: dict[float, float] = {}
        wanted = set(labels.items())
        for (known, own), value in self.samples.items():
            if known == f"{name}_bucket" and wanted <= own:
                bound = float(dict(own)["le"])
                bounds[bound] = bounds.get(bound, 0.0) + value - before.samples.get((known, own), 0.0)
        return interpolate(sorted(bounds.items()), q)


def interpolate(cumulative: Iterable[tuple[float, float]], q: float) -> float | None:
    """The q-quantile of (upper bound, count up to it) pairs in rising order, as Prometheus' histogram_quantile; None for no count.

    What lies above the last finite bound counts as that bound.
    """
    pairs = list(cumulative)
    total = pairs[-1][1] if pairs else 0.0
    if total <= 0:
        return None
    low, below = 0.0, 0.0
    for bound, count in pairs:
        if count >= q * total and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (q * total - below) / (count - below)
        low, below = (low if math.isinf(bound) else bound), count
    return low


def scrape(url: str, *, token: str | None = None, ca: str | None = None, timeout_s: float) -> Scrape:
    """Look now. Raises GatewayUnreachableError, AccessError, and ConfigError for a URL that is none."""
    text = _get(url, METRICS, token, ca, timeout_s)
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    if not any(name == "disagg_gateway_info" for name, _ in samples):
        raise GatewayUnreachableError(f"what answers at {url} is not a disagg gateway", address=url)
    obstacle = _get(url, READY, token, ca, timeout_s).strip().removeprefix("not ready: ")
    return Scrape(time.monotonic(), samples, None if obstacle == "ready" else obstacle)


def _get(url: str, path: str, token: str | None, ca: str | None, timeout_s: float) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(key="url", value=url, expected="http://HOST:PORT or https://HOST:PORT")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url.rstrip("/") + path, headers=headers)  # noqa: S310 - the scheme is checked above
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if ca is not None:
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca)))
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise AccessError(f"{url} asks for a bearer token: give it by --token") from error
        if error.code == 503:
            return error.read().decode()
        raise GatewayUnreachableError(f"what answers at {url} is not a disagg gateway (status {error.code})", address=url) from error
    except (OSError, ValueError) as error:
        raise GatewayUnreachableError(f"no gateway answers at {url}: {error}", address=url) from error
