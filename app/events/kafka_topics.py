"""The topics: made by an explicit command, checked at every start."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from kafka import KafkaAdminClient
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.errors import for_code

from app.errors import SetupError
from app.events.kafka_client import Cluster, as_log_error, kafka_errors

REASON_BYTES = 2**16  # what a dead letter has beyond its event
UNKNOWN_TOPIC = 3
ALREADY_THERE = 36


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the settings want it."""

    name: str
    partitions: int
    configs: Mapping[str, str]


def wanted(cluster: Cluster) -> tuple[Topic, Topic]:
    """The topics of events and of dead letters; dead letters stay until they are replayed or dropped."""
    table = cluster.table
    shared = {
        "cleanup.policy": "delete",
        "retention.bytes": "-1",
        "min.insync.replicas": str(table.min_insync_replicas),
    }
    events = shared | {
        "retention.ms": str(int(1000 * table.retention_s)),
        "max.message.bytes": str(table.max_message_bytes),
    }
    dead = shared | {"retention.ms": "-1", "max.message.bytes": str(table.max_message_bytes + REASON_BYTES)}
    return Topic(cluster.events_topic, cluster.partitions, events), Topic(cluster.dead_topic, 1, dead)


def create(cluster: Cluster) -> list[str]:
    """Make the topics that are missing; their names. What exists is left as it is.

    Raises SetupError where Kafka refuses one, LogUnavailable where no broker answers.
    """
    topics = {
        topic.name: {
            "num_partitions": topic.partitions,
            "replication_factor": cluster.table.replication,
            "configs": dict(topic.configs),
        }
        for topic in wanted(cluster)
    }
    with kafka_errors(cluster), closing(cluster.admin()) as admin:
        answers = admin.create_topics(topics, raise_errors=False)["topics"]
    for answer in answers:
        if answer["error_code"] not in (0, ALREADY_THERE):
            raise _refused(answer["name"], for_code(answer["error_code"]), answer["error_message"])
    return [answer["name"] for answer in answers if not answer["error_code"]]


def check(cluster: Cluster) -> list[str]:
    """What differs from the settings, each with what to do; raises LogUnavailable where no broker answers."""
    with kafka_errors(cluster), closing(cluster.admin()) as admin:
        return [fault for topic in wanted(cluster) for fault in _faults(cluster, admin, topic)]


def require(cluster: Cluster) -> None:
    """Raises SetupError where a topic is missing, LogUnavailable where no broker answers."""
    with kafka_errors(cluster), closing(cluster.admin()) as admin:
        missing = [topic.name for topic in wanted(cluster) if _describe(cluster, admin, topic.name) is None]
    if missing:
        raise SetupError(
            f"{cluster} has no topic {' and no topic '.join(missing)}; make them with `riacho log create`",
            param="log_url",
        )


def _faults(cluster: Cluster, admin: KafkaAdminClient, topic: Topic) -> Iterator[str]:
    partitions = _describe(cluster, admin, topic.name)
    if partitions is None:
        yield f"{topic.name} is missing: run `riacho log create`"
        return
    if len(partitions) != topic.partitions:
        yield _partition_fault(topic, len(partitions))
    copies = min(len(partition["replica_nodes"]) for partition in partitions)
    if copies < cluster.table.replication:
        yield (
            f"{topic.name} has {copies} copies of a partition, kafka.replication is {cluster.table.replication}: "
            "reassign its partitions with kafka-reassign-partitions, or change the setting"
        )
    for number in (partition["partition_index"] for partition in partitions if partition["leader_id"] < 0):
        yield f"{topic.name} partition {number} has no leader: start the brokers that hold it"
    found = _configs(admin, topic.name)
    for key, value in topic.configs.items():
        if found.get(key) != value:
            yield (
                f"{topic.name} has {key} = {found.get(key, 'unset')}, the settings want {value}: kafka-configs --alter "
                f"--entity-type topics --entity-name {topic.name} --add-config {key}={value}, or change the setting"
            )


def _partition_fault(topic: Topic, found: int) -> str:
    told = f"{topic.name} has {found} partitions, the settings want {topic.partitions}"
    if topic.partitions == 1:
        return f"{told}: a topic cannot lose partitions; use another kafka.topic"
    if found > topic.partitions:
        return f"{told}: a topic cannot lose partitions; set RIACHO_PARTITIONS={found}"
    return (
        f"{told}: kafka-topics --alter --topic {topic.name} --partitions {topic.partitions} while no session is open "
        f"(sessions move to other partitions), or set RIACHO_PARTITIONS={found}"
    )


def _describe(cluster: Cluster, admin: KafkaAdminClient, name: str) -> list[dict[str, Any]] | None:
    """A topic's partitions, None for a topic that is not there."""
    [found] = admin.describe_topics([name])
    if found["error_code"] == UNKNOWN_TOPIC:
        return None
    if found["error_code"]:
        raise as_log_error(cluster, for_code(found["error_code"])(name))
    partitions: list[dict[str, Any]] = found["partitions"]
    return partitions


def _configs(admin: KafkaAdminClient, name: str) -> dict[str, str]:
    resource = ConfigResource(ConfigResourceType.TOPIC, name)
    found = admin.describe_configs([resource], config_filter="all")["topic"][name]
    return {key: entry["value"] for key, entry in found.items()}


def _refused(name: str, kind: type[Exception], message: str | None) -> SetupError:
    return SetupError(
        f"Kafka does not make the topic {name}: {message or kind.__name__}; "
        "a single broker takes only RIACHO_KAFKA_REPLICATION=1",
        param="kafka",
    )
