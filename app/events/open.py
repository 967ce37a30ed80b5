"""Open the event log that the settings name. Kafka's client is imported only where the log is on Kafka."""

from pathlib import Path
from typing import TYPE_CHECKING, Optional

from app.errors import SetupError
from app.events.log import EventLog
from app.events.sqlite import SqliteLog
from app.settings import SharedSettings

if TYPE_CHECKING:
    from app.events.kafka_client import Cluster

ADDRESSES = "sqlite:///PATH (an absolute path takes four slashes) or kafka://HOST:PORT"


def open_log(settings: SharedSettings) -> EventLog:
    """The log at `log_url`; raises SetupError for an address that is none."""
    cluster = kafka_cluster(settings)
    if cluster is not None:
        from app.events.kafka import KafkaLog

        return KafkaLog(cluster)
    scheme, _, path = settings.resolved_log_url.partition(":///")
    if scheme == "sqlite" and path:
        return SqliteLog(Path(path), settings.partitions)
    raise SetupError(f"log_url = {settings.log_url!r}: give {ADDRESSES}", param="log_url")


def kafka_cluster(settings: SharedSettings) -> Optional["Cluster"]:
    """The cluster at `log_url`, None for a log that is not on Kafka."""
    if not settings.resolved_log_url.startswith("kafka://"):
        return None
    try:
        from app.events.kafka_client import Cluster
    except ModuleNotFoundError as error:
        raise SetupError(
            f"log_url = {settings.log_url!r} needs {error.name}: pip install 'riacho[kafka]'", param="log_url"
        ) from error
    return Cluster.of(settings)
