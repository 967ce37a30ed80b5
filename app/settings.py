"""Settings: what both processes share, and the app's. The learner adds its own in learner/settings.py."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from app.events.kafka_settings import KafkaSettings
from app.events.schema import DEFAULT_SIGNAL, Signal

TINY_MODEL = Path(__file__).parent / "models" / "tiny-qwen3"


class RewardSettings(BaseModel):
    """One named signal: what it weighs, and who gives it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = Field(1.0, allow_inf_nan=False, description="a rollout's reward is the sum of weight * value")
    scorer: str | None = Field(
        None, min_length=1, description="entry point (group riacho.rewards) that gives it; absent = clients do"
    )
    options: dict[str, Any] = Field({}, description="the scorer's own")
    on_failure: Literal["train", "park"] = Field(
        "train", description="a session that cannot be scored: train without this signal, or park it and try again"
    )

    @model_validator(mode="after")
    def _options_of_a_scorer(self) -> Self:
        if self.options and self.scorer is None:
            raise ValueError(f"options = {sorted(self.options)} without a scorer; name the scorer that they are for")
        return self


class SharedSettings(BaseModel):
    """What the app and the learner must agree on."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    home: Path = Field(Path("~/.riacho"), description="state, keys, adapters, spool")
    log_url: str = Field("", description="the event log; empty = sqlite:///HOME/log.db; kafka://HOST:PORT,…")
    database_url: str = Field("", description="the registry; empty = sqlite:///HOME/registry.db")
    adapter_store: Path | None = Field(None, description="adapter versions; empty = HOME/adapters")
    policy: str = Field("riacho", pattern=r"^[a-z0-9][a-z0-9._-]{0,31}$", description="the policy's name")
    model: str = Field(str(TINY_MODEL), description="base model: a directory or a hub name")
    reward_min: float = Field(0.0, allow_inf_nan=False, description="a thumb down")
    reward_max: float = Field(1.0, allow_inf_nan=False, description="a thumb up")
    partitions: int = Field(1, ge=1, le=1024, description="partitions of a new log")
    feedback_ttl_s: float = Field(86_400.0, gt=0, description="event time for which a completion waits for feedback")
    rewards: dict[Signal, RewardSettings] = Field(
        {DEFAULT_SIGNAL: RewardSettings()}, description="the signals; naming some replaces the default"
    )
    kafka: KafkaSettings = KafkaSettings()

    @field_validator("home", "adapter_store")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()

    @model_validator(mode="after")
    def _reward_range(self) -> Self:
        if self.reward_min >= self.reward_max:
            raise ValueError(
                f"reward_min = {self.reward_min} is not below reward_max = {self.reward_max}; "
                "give the range that your rewards have, such as 0 and 1"
            )
        return self

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        if not any(reward.weight for reward in self.rewards.values()):
            raise ValueError(
                "rewards: no signal weighs anything, so nothing would be learned; give one a weight other than 0"
            )
        return self

    @model_validator(mode="after")
    def _kept_while_waiting(self) -> Self:
        if self.log_url.startswith("kafka:") and self.kafka.retention_s < self.feedback_ttl_s:
            raise ValueError(
                f"kafka.retention_s = {self.kafka.retention_s:g} is below feedback_ttl_s = {self.feedback_ttl_s:g}: "
                "completions would be gone before their feedback; keep them longer, or wait less long"
            )
        return self

    @property
    def scorers(self) -> dict[str, RewardSettings]:
        """The signals that reward functions give, not clients."""
        return {signal: reward for signal, reward in self.rewards.items() if reward.scorer is not None}

    @property
    def resolved_log_url(self) -> str:
        return self.log_url or f"sqlite:///{self.home / 'log.db'}"

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home / 'registry.db'}"

    @property
    def resolved_adapter_store(self) -> Path:
        return self.adapter_store or self.home / "adapters"


class AppSettings(SharedSettings):
    """The serving process."""

    engine_urls: str = Field("local", description="`local`, or addresses of vLLM servers, comma-separated")
    host: str = "127.0.0.1"
    port: int = Field(8700, ge=0, le=65535)
    auth: bool = Field(True, description="false only on a loopback address")
    admin_key: SecretStr | None = Field(None, description="first admin key; made at first start if absent")
    client_key: SecretStr | None = Field(None, description="first client key; made at first start if absent")
    slots: int = Field(8, ge=2, description="adapter versions that an engine holds at once")
    engine_threads: int = Field(1, ge=1, description="CPU threads of the local engine")
    keep_versions: int = Field(100, ge=1, description="newest versions whose files stay on disk")
    default_max_tokens: int = Field(256, ge=1, description="max_tokens of a request that names none")
    on_capture_failure: Literal["fail_closed", "fail_open"] = Field(
        "fail_closed", description="an answer that cannot be recorded: refuse it, or let it go and count the loss"
    )
    spool_max_bytes: int = Field(
        2**30, ge=2**20, description="events that wait while the log is away; a full spool is a capture failure"
    )
    max_body_bytes: int = Field(8 * 2**20, ge=1024)
    poll_s: float = Field(0.1, gt=0, le=1, description="how often the live version is looked up")
    deployer_lease_s: float = Field(10.0, gt=0)

    @property
    def vllm_urls(self) -> list[str]:
        """The addresses in `engine_urls`, none for the local engine; whether they are addresses is not checked."""
        if self.engine_urls == "local":
            return []
        return [url.strip().rstrip("/") for url in self.engine_urls.split(",") if url.strip()]

    @property
    def spool_path(self) -> Path:
        """A policy's own: processes of another policy on the same home forward to another log."""
        return self.home / f"spool-{self.policy}.db"

    @model_validator(mode="after")
    def _no_open_door(self) -> Self:
        if not self.auth and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(
                f"auth = false on host = {self.host!r} would serve everybody; "
                "use host = 127.0.0.1, or leave authentication on"
            )
        return self
