"""From settings to Kafka clients, and from Kafka's errors to the log's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka.errors import AuthorizationError, KafkaError, LogTruncationError, SaslAuthenticationFailedError
from kafka.net.compat import KafkaNetClient

from app.errors import SetupError
from app.events.kafka_settings import KafkaSettings
from app.events.log import LogUnavailable
from app.settings import SharedSettings

T = TypeVar("T")

SCHEME = "kafka://"
BATCH_BYTES = 2**18
FETCH_WAIT_MS = 250


@dataclass(frozen=True, slots=True)
class Cluster:
    """One policy's place on a Kafka cluster.

    Attributes:
        servers: `host:port` of some brokers; the others are learned from them.
        partitions: of an events topic that does not exist yet.
    """

    servers: tuple[str, ...]
    table: KafkaSettings
    policy: str
    partitions: int

    @classmethod
    def of(cls, settings: SharedSettings) -> "Cluster":
        """The cluster that `log_url` names; raises SetupError for an address that is none."""
        servers = tuple(settings.resolved_log_url.removeprefix(SCHEME).split(","))
        if not all(_is_address(server) for server in servers):
            raise SetupError(
                f"log_url = {settings.log_url!r}: give kafka://HOST:PORT, or several HOST:PORT with commas between",
                param="log_url",
            )
        return cls(servers, settings.kafka, settings.policy, settings.partitions)

    def __str__(self) -> str:
        return SCHEME + ",".join(self.servers)

    @property
    def events_topic(self) -> str:
        return self.table.events_topic(self.policy)

    @property
    def dead_topic(self) -> str:
        return self.table.dead_topic(self.policy)

    @property
    def group(self) -> str:
        return self.table.group(self.policy)

    @property
    def request_timeout_ms(self) -> int:
        """Half of an append's time, so that one lost request can be sent again."""
        return int(500 * self.table.delivery_timeout_s)

    def admin(self) -> KafkaAdminClient:
        return self._build(KafkaAdminClient)

    def consumer(self) -> KafkaConsumer:
        """A consumer without a group: nothing is ever assigned to it, and no offset is reset behind its back."""
        return self._build(
            KafkaConsumer,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            allow_auto_create_topics=False,
            fetch_max_wait_ms=FETCH_WAIT_MS,
        )

    def producer(self) -> KafkaProducer:
        compression = self.table.compression
        return self._build(
            KafkaProducer,
            acks="all",
            enable_idempotence=True,
            allow_auto_create_topics=False,
            compression_type=None if compression == "none" else compression,
            batch_size=BATCH_BYTES,
            # The limit is checked before the send; a dead letter is larger than its event by the reason.
            max_request_size=2 * self.table.max_message_bytes,
            delivery_timeout_ms=int(1000 * self.table.delivery_timeout_s),
            max_block_ms=self.request_timeout_ms,
        )

    def _build(self, kind: Callable[..., T], **options: Any) -> T:
        """A client that leaves no thread and no socket behind where its constructor finds no broker."""
        made: list[KafkaNetClient] = []

        def net_client(**configs: Any) -> KafkaNetClient:
            made.append(KafkaNetClient(**configs))
            return made[-1]

        try:
            return kind(**self._common(), **options, kafka_client=net_client)
        except KafkaError:
            for client in made:
                client.close()
            raise

    def _common(self) -> dict[str, Any]:
        table = self.table
        options: dict[str, Any] = {
            "bootstrap_servers": list(self.servers),
            "client_id": f"riacho-{self.policy}",
            "security_protocol": table.security_protocol,
            "request_timeout_ms": self.request_timeout_ms,
            "bootstrap_timeout_ms": self.request_timeout_ms,
            "reconnect_backoff_max_ms": 1000,
            "ssl_cafile": _text(table.ca_file),
            "ssl_certfile": _text(table.cert_file),
            "ssl_keyfile": _text(table.key_file),
        }
        if table.password is not None:
            options |= {
                "sasl_mechanism": table.sasl_mechanism,
                "sasl_plain_username": table.username,
                "sasl_plain_password": table.password.get_secret_value(),
            }
        return options


def _text(path: object) -> str | None:
    return None if path is None else str(path)


def _is_address(server: str) -> bool:
    host, _, port = server.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 2**16


@contextmanager
def kafka_errors(cluster: Cluster) -> Iterator[None]:
    """Kafka's errors as the log's: SetupError for what an operator has to change, LogUnavailable for the rest."""
    try:
        yield
    except KafkaError as error:
        raise as_log_error(cluster, error) from error


def as_log_error(cluster: Cluster, error: BaseException) -> LogUnavailable | SetupError:
    """The log's error for one of Kafka's."""
    if isinstance(error, SaslAuthenticationFailedError | AuthorizationError):
        return SetupError(
            f"{cluster} refuses kafka.username = {cluster.table.username!r}: {error}; "
            "check the [kafka] table, and the user's rights on the policy's topics",
            param="kafka",
        )
    if isinstance(error, LogTruncationError):
        return SetupError(f"{cluster} has lost records that were read already: {error}; restore them", param="log_url")
    return LogUnavailable(f"{cluster} does not take or give records now: {error}; see that its brokers run")
