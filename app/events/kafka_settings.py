"""The `[kafka]` table: what the Kafka log needs beyond `log_url`, which names the brokers."""

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FilePath, SecretStr, field_validator, model_validator

TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
DAY_S = 86_400.0


class KafkaSettings(BaseModel):
    """How topics are made, how clients log in, and how long an append may take."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    topic: str = Field("riacho.{policy}", description="prefix of the topics' names, PREFIX.events and PREFIX.dead")
    replication: int = Field(3, ge=1, le=32767, description="copies of each partition; 1 for a single broker")
    retention_s: float = Field(30 * DAY_S, gt=0, description="at least the age of the oldest checkpoint to resume from")
    max_message_bytes: int = Field(
        16 * 2**20, ge=2**16, le=2**26, description="the largest event; room for max_body_bytes and the tokens"
    )
    compression: Literal["none", "gzip", "lz4", "zstd"] = "zstd"
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    username: str | None = Field(None, description="with SASL_PLAINTEXT or SASL_SSL")
    password: SecretStr | None = Field(None, description="with SASL_PLAINTEXT or SASL_SSL")
    ca_file: FilePath | None = Field(None, description="PEM that signs the brokers; empty = the system's")
    cert_file: FilePath | None = Field(None, description="PEM of this client, where brokers ask for one")
    key_file: FilePath | None = Field(None, description="PEM key of cert_file")
    delivery_timeout_s: float = Field(10.0, ge=2, le=300, description="an append that takes longer has failed")
    max_in_flight: int = Field(256, ge=1, description="events sent and not yet acknowledged; more wait their turn")

    @field_validator("topic")
    @classmethod
    def _one_topic_a_policy(cls, topic: str) -> str:
        if "{policy}" not in topic or not TOPIC_NAME.fullmatch(topic.replace("{policy}", "p")):
            raise ValueError(
                "give {policy} and letters, digits, dots, underscores and hyphens around it, such as riacho.{policy}"
            )
        return topic

    @model_validator(mode="after")
    def _login(self) -> Self:
        sasl = self.security_protocol.startswith("SASL")
        if sasl and not (self.username and self.password):
            raise ValueError(f"security_protocol = {self.security_protocol} needs username and password")
        if not sasl and (self.username or self.password):
            raise ValueError(
                f"username and password are not sent with security_protocol = {self.security_protocol}; use SASL_SSL"
            )
        return self

    @model_validator(mode="after")
    def _certificates(self) -> Self:
        files: tuple[Path | None, ...] = (self.ca_file, self.cert_file, self.key_file)
        if any(files) and not self.security_protocol.endswith("SSL"):
            raise ValueError(
                f"ca_file, cert_file and key_file are not used with security_protocol = {self.security_protocol}; "
                "use SSL or SASL_SSL"
            )
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        return self

    @property
    def min_insync_replicas(self) -> int:
        """Copies that an append waits for: one broker may be away without stopping appends."""
        return max(1, self.replication - 1)

    def events_topic(self, policy: str) -> str:
        return f"{self.topic.format(policy=policy)}.events"

    def dead_topic(self, policy: str) -> str:
        return f"{self.topic.format(policy=policy)}.dead"

    def group(self, policy: str) -> str:
        """The consumer group under which the learner's progress shows in Kafka's tools."""
        return f"{self.topic.format(policy=policy)}.learner"
