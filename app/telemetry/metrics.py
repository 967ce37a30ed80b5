"""Prometheus metrics of one app process, and of the learner as the registry shows it."""

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from app.engines.base import EngineState
from app.events.schema import CompletionEvent

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LEARNER_METRICS = (
    "reward",
    "reward_mean",
    "masked_low",
    "masked_high",
    "effective_sample_size",
    "logprob_gap",
    "ratio_mean",
    "version_lag",
    "advantage_mean",
    "advantage_rms",
    "explained_variance",
    "policy_grad_norm",
    "critic_grad_norm",
    "entropy",
    "kl_to_base",
    "rollout_tokens",
    "rollout_tokens_mean",
    "turn_tokens",
    "turn_tokens_mean",
)


class Metrics:
    """An own registry, so that two apps in one process do not share counters."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "riacho_http_requests", "HTTP requests", ("method", "route", "status"), registry=registry
        )
        self.request_seconds = Histogram(
            "riacho_http_request_seconds",
            "Time to the end of the response",
            ("route",),
            buckets=SECONDS,
            registry=registry,
        )
        self.completions = Counter(
            "riacho_completions", "Completions recorded", ("finish_reason", "trainable"), registry=registry
        )
        self.tokens = Counter("riacho_tokens", "Tokens read and sampled", ("kind",), registry=registry)
        self.tool_calls = Counter(
            "riacho_tool_calls", "Tool calls of answers, and answers without one", ("kind",), registry=registry
        )
        self.first_token_seconds = Histogram(
            "riacho_first_token_seconds", "Time to the first chunk of an answer", buckets=SECONDS, registry=registry
        )
        self.lost_events = Counter("riacho_lost_events", "Events that could not be recorded", registry=registry)
        self.refused_events = Counter("riacho_refused_events", "Events that the log will never take", registry=registry)
        self.spool_events = Gauge("riacho_spool_events", "Events that wait for the log", registry=registry)
        self.spool_bytes = Gauge("riacho_spool_bytes", "Bytes of the events that wait for the log", registry=registry)
        self.forwarded_events = Counter(
            "riacho_spool_forwarded", "Events forwarded from the spool to the log", registry=registry
        )
        self.feedback = Counter("riacho_feedback", "Judgements accepted", ("final",), registry=registry)
        self.engines = Gauge(
            "riacho_engines", "Replicas in service, and those that are out", ("state",), registry=registry
        )
        self.live_version = Gauge("riacho_live_version", "The adapter version that serves", registry=registry)
        self.leases = Gauge("riacho_leases", "Requests that hold a version", registry=registry)
        self.loaded_versions = Gauge("riacho_loaded_versions", "Adapter versions in the engine", registry=registry)
        self.log_end = Gauge("riacho_log_events", "Events on the log", registry=registry)
        self.learner_lag = Gauge(
            "riacho_learner_lag_events", "Events after the newest checkpoint's position", registry=registry
        )
        self.updates = Gauge("riacho_learner_updates", "Updates that the learner has made", registry=registry)
        self.not_trained = Gauge(
            "riacho_learner_not_trained",
            "Rollouts and events that no update used, as of the newest update",
            ("reason",),
            registry=registry,
        )
        self.held = Gauge(
            "riacho_held_completions", "Completions whose session waits for scores", ("state",), registry=registry
        )
        self.scores = Gauge(
            "riacho_learner_scores",
            "Scores and failures of reward functions so far, and sessions parked, as of the newest update",
            ("signal", "outcome"),
            registry=registry,
        )
        self.learner_tool_calls = Gauge(
            "riacho_learner_tool_calls", "Tool calls in the newest update, by kind", ("kind",), registry=registry
        )
        self.learner = Gauge("riacho_learner", "A metric of the newest update", ("metric",), registry=registry)

    def captured(self, event: CompletionEvent) -> None:
        self.completions.labels(event.finish_reason, str(event.trainable).lower()).inc()
        self.tokens.labels("prompt").inc(event.usage.prompt_tokens)
        self.tokens.labels("completion").inc(event.usage.completion_tokens)
        for kind in event.tool_call_kinds:
            self.tool_calls.labels(kind).inc()

    def show_engines(self, states: Sequence[EngineState]) -> None:
        serving = sum(state.serving for state in states)
        self.engines.labels("serving").set(serving)
        self.engines.labels("out").set(len(states) - serving)

    def show_update(self, number: int, metrics: Mapping[str, Any]) -> None:
        self.updates.set(number)
        for name in LEARNER_METRICS:
            if metrics.get(name) is not None:
                self.learner.labels(name).set(metrics[name])
        for reason, count in metrics.get("not_trained", {}).items():
            self.not_trained.labels(reason).set(count)
        for name, count in metrics.get("scores", {}).items():
            signal, outcome = name.split(".")
            self.scores.labels(signal, outcome).set(count)
        self.learner_tool_calls.clear()
        for kind, count in metrics.get("tool_calls", {}).items():
            self.learner_tool_calls.labels(kind).set(count)

    def render(self) -> bytes:
        return generate_latest(self.registry)
