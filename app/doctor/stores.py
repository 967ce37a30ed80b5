"""What is kept: the registry, the event log, versions; and whether a learner reads the log."""

from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

from app.doctor.findings import Finding, look
from app.engines.adapter_shapes import base_shapes, check_adapter
from app.engines.base import BASE_VERSION, Adapter
from app.errors import NotFound, RiachoError, SetupError
from app.events.log import EventLog
from app.events.open import kafka_cluster, open_log
from app.events.spool_view import SpoolView, view_spool
from app.fingerprint import fingerprint, model_directory
from app.registry import Registry, utc_now
from app.settings import AppSettings
from app.tensor_files import TensorFile

WAITING = timedelta(minutes=1)
MANY = 1000


def check_stores(settings: AppSettings) -> list[Finding]:
    """The findings about registry and log; what needs one that cannot be opened is left unknown, and said to be."""
    with ExitStack() as stack:
        opened = _Opened(settings, stack)
        database = "set RIACHO_DATABASE_URL, or run `riacho db upgrade` (`riacho up` does so itself)"
        log = "set RIACHO_LOG_URL, start the broker, or restore the log from a backup"
        findings = [look("database", database, opened.database), look("log", log, opened.log)]
        registry, events = opened.registry, opened.events
        if registry is not None:
            findings += _registered(settings, registry)
        findings.append(look("spool", "repair the file, or move it away: what waits in it is lost", opened.spool))
        if events is not None:
            findings += topics(settings)
            findings.append(look("dead letters", "see `riacho log dead`", lambda: dead_letters(events)))
        if registry is not None and events is not None:
            mend = "mend the registry or the log"
            findings.append(look("learner", mend, lambda: learner(settings.policy, registry, events)))
        else:
            found = "not known without the registry and the log"
            findings.append(Finding("learner", "warn", found, "mend those first"))
        return findings


class _Opened:
    """The registry and the log, None as long as they could not be opened; closed with `stack`."""

    def __init__(self, settings: AppSettings, stack: ExitStack) -> None:
        self._settings = settings
        self._stack = stack
        self.registry: Registry | None = None
        self.events: EventLog | None = None

    def database(self) -> Finding:
        """Open the registry at this code's revision; raises SetupError."""
        url = self._settings.resolved_database_url
        missing = _missing_file(url)
        if missing is not None:
            raise SetupError(f"there is no registry at {missing}")
        self.registry = self._stack.enter_context(closing(Registry.open(url)))
        return Finding("database", "ok", "reachable, at this code's revision")

    def log(self) -> Finding:
        """Open the log and ask where it ends; raises SetupError or LogUnavailable."""
        url = self._settings.resolved_log_url
        missing = _missing_file(url)
        if missing is not None:
            policy = self._settings.policy
            return _no_log(missing, self.registry is not None and self.registry.versions.latest_number(policy) > 0)
        events = self._stack.enter_context(closing(open_log(self._settings)))
        ends = events.end_positions()
        self.events = events
        scheme = url.partition(":")[0]
        kind = "embedded" if scheme == "sqlite" else scheme
        return Finding("log", "ok", f"{kind}, partitions: {len(ends)}, events: {sum(ends.values())}")

    def spool(self) -> Finding:
        """Events that wait on this machine, and those that the log refused; raises SetupError."""
        return spool(view_spool(self._settings.spool_path), self._settings.spool_max_bytes)


def _registered(settings: AppSettings, registry: Registry) -> list[Finding]:
    restore = "restore its directory from a backup, or roll back to a version that is whole"
    return [
        look("policy", "set RIACHO_MODEL to its base", lambda: policy(settings, registry)),
        look("versions", restore, lambda: versions(settings, registry)),
        look("outbox", "mend the registry", lambda: outbox(settings.policy, registry)),
    ]


def _no_log(path: Path, learned: bool) -> Finding:
    if learned:
        found = f"there is no event log at {path}, but versions were learned from one"
        return Finding("log", "fail", found, "set RIACHO_LOG_URL, or restore the log from a backup")
    return Finding("log", "warn", f"there is no event log at {path} yet", "start the app: it makes one")


def _missing_file(url: str) -> Path | None:
    """The file of an embedded database that is not there: looking must not make one."""
    scheme, _, path = url.partition(":///")
    return Path(path) if scheme == "sqlite" and not Path(path).exists() else None


def policy(settings: AppSettings, registry: Registry) -> Finding:
    """The policy was made for this base and this range of rewards; raises SetupError for a model that is not here."""
    try:
        record = registry.policies.get(settings.policy)
    except NotFound:
        return Finding("policy", "warn", f"there is no policy {settings.policy!r} yet", "start the app: it makes it")
    if record.fingerprint != fingerprint(settings.model):
        found = f"{record.name!r} belongs to the base {record.base_model}, not to {settings.model}"
        return Finding("policy", "fail", found, "set RIACHO_MODEL to its base, or RIACHO_POLICY to another name")
    if (record.reward_min, record.reward_max) != (settings.reward_min, settings.reward_max):
        found = f"{record.name!r} has rewards from {record.reward_min:g} to {record.reward_max:g}"
        return Finding("policy", "fail", found, "set RIACHO_REWARD_MIN and RIACHO_REWARD_MAX to that range")
    return Finding("policy", "ok", f"{record.name!r} serves version {record.live_version or 'base'}")


def versions(settings: AppSettings, registry: Registry) -> Finding:
    """The files of the live version and of the learner's newest checkpoint are whole.

    Raises AdapterRejected, BadTensorFile or OSError with the reason.
    """
    newest = registry.versions.newest_checkpoint(settings.policy)
    live = {record.live_version for record in registry.policies.list() if record.name == settings.policy}
    numbers = sorted((live | {newest.number if newest else BASE_VERSION}) - {BASE_VERSION})
    shapes = base_shapes(model_directory(settings.model))
    for number in numbers:
        record = registry.versions.get(settings.policy, number)
        directory = settings.resolved_adapter_store / settings.policy / record.directory
        check_adapter(Adapter(settings.policy, number, directory), shapes)
        for file in sorted(directory.glob("*.safetensors")):
            TensorFile.open(file).require_whole()
    return Finding("versions", "ok", f"whole: {', '.join(map(str, numbers)) or 'none yet but the base'}")


def outbox(policy: str, registry: Registry) -> Finding:
    """Judgements and rollbacks that were accepted reach the log."""
    waiting = len(registry.outbox.pending(policy, utc_now() - WAITING, MANY))
    if not waiting:
        return Finding("outbox", "ok", "nothing waits for the log")
    found = f"{waiting}{' or more' if waiting == MANY else ''} accepted events have waited for the log for a minute"
    return Finding("outbox", "warn", found, "start the app, which appends them; if it runs, the log takes nothing")


def spool(view: SpoolView, limit: int) -> Finding:
    """Nothing waits for the log, and the log refused nothing."""
    if view.bytes >= limit:
        found = f"it is full: {view.events} events ({view.bytes} bytes) wait for the log"
        return Finding("spool", "fail", found, "bring the log back, or allow more (RIACHO_SPOOL_MAX_BYTES)")
    if view.refused:
        found = f"the log refused {len(view.refused)} events, the last because {view.refused[-1].reason}"
        return Finding("spool", "warn", found, "`riacho log spool` lists them; raise the limit that they passed")
    if view.events:
        found = f"{view.events} events ({view.bytes} bytes) wait for the log"
        return Finding("spool", "warn", found, "start the app, which forwards them; if it runs, bring the log back")
    return Finding("spool", "ok", "nothing waits for the log")


def topics(settings: AppSettings) -> list[Finding]:
    """Each way in which a Kafka log's topics differ from the settings; nothing for a log that has none."""
    cluster = kafka_cluster(settings)
    if cluster is None:
        return []
    from app.events import kafka_topics

    try:
        faults = kafka_topics.check(cluster)
    except RiachoError as error:
        return [Finding("topics", "fail", error.message, "start the brokers, or correct RIACHO_LOG_URL")]
    found = [fault.partition(": ") for fault in faults]
    return [Finding("topics", "fail", fault, advice) for fault, _, advice in found] or [
        Finding("topics", "ok", "as the settings want them")
    ]


def dead_letters(events: EventLog) -> Finding:
    """Records that the learner could not apply."""
    count = len(events.dead_letters())
    if not count:
        return Finding("dead letters", "ok", "none")
    advice = "`riacho log dead` gives the reasons, `riacho log replay ID` puts one on the log again"
    return Finding("dead letters", "warn", f"{count} records could not be applied", advice)


def learner(policy: str, registry: Registry, events: EventLog) -> Finding:
    """Somebody holds the learner's lease, or nothing waits for one."""
    holder = registry.leases.holder(f"learner:{policy}")
    ends = events.end_positions()
    newest = registry.versions.newest_checkpoint(policy)
    if newest and any(ends.get(int(part), 0) < offset for part, offset in newest.position.items()):
        found = f"version {newest.number} has read up to {newest.position}, but the log ends at {ends}"
        return Finding("learner", "fail", found, "restore the log that the versions were learned from")
    lag = registry.versions.lag(policy, ends)
    paused = any(record.learning_paused for record in registry.policies.list() if record.name == policy)
    behind = f"{lag} events lie after the newest checkpoint"
    if paused:
        advice = f"POST /admin/policies/{policy}/resume when learning shall go on"
        return Finding("learner", "warn", f"learning is paused; {behind}", advice)
    if holder is not None:
        return Finding("learner", "ok", f"{holder.holder} learns; {behind}")
    advice = "start it with `riacho learn` (or `riacho up`); its log says why the last one ended"
    return Finding("learner", "fail" if lag else "warn", f"no learner runs; {behind}", advice)
