"""The learner's settings: every hyper-parameter of SAO, each with its meaning and an error that teaches.

Defaults were chosen by measurement on the shipped tiny model (rewards in [0, 1], one rollout an update). Where
the paper (arXiv 2607.07508) has a value for full-parameter training, its docstring gives it.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from app.settings import SharedSettings
from learner.sao import Band

TUNED_WIDTH = 128
TUNED_POLICY_LR = 3e-3
TUNED_CRITIC_LR = 2e-3


class TrainingSettings(BaseModel):
    """What one update does; stored with every version that it made."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    seed: int = Field(0, description="initial LoRA weights")

    eps_low: float = Field(
        0.3, allow_inf_nan=True, description="DIS: ratios must lie above 1 - eps_low (paper: 0.3; coding agents 0.8)"
    )
    eps_high: float = Field(
        5.0, allow_inf_nan=True, description="DIS: ratios must lie below 1 + eps_high (paper: 5.0; coding agents 3.0)"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount per action token (paper: 1)")
    lambda_alpha: float = Field(1.5, gt=0, description="policy lambda = 1 - 1 / (alpha * action tokens) (paper: 1.5)")
    critic_steps: int = Field(2, ge=1, description="critic steps an update, K (paper: 2)")
    critic_warmup: int = Field(0, ge=0, description="first updates that train the critic only (paper: 10)")
    rollouts_per_update: int = Field(1, ge=1, description="finished rollouts accumulated into one update (paper: 128)")
    max_version_lag: int = Field(64, ge=0, description="older rollouts are dropped and counted")

    policy_lr: float | None = Field(
        None, gt=0, description="AdamW; absent = 3e-3 * 128 / hidden size (paper, full parameters: 1e-6)"
    )
    critic_lr: float | None = Field(
        None, gt=0, description="AdamW; absent = 2e-3 * 128 / hidden size (paper, full parameters: 5e-6)"
    )
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    policy_eps: float | None = Field(
        None,
        gt=0,
        description="AdamW of the policy; absent = 0.03 / sqrt(trained weights), so that gradients that are mostly "
        "noise do not move the policy at the full rate",
    )
    policy_clip: float = Field(0.1, gt=0, description="gradient norm; one that never acts lets Adam follow noise")
    critic_clip: float = Field(10.0, gt=0, description="gradient norm; 1.0 starved critics with norms of 7 to 68")

    rank: int = Field(8, ge=1, le=512, description="LoRA rank of the policy; vLLM serves 8, 16, 32, 64, 128, 256")
    lora_alpha: int = Field(16, gt=0, description="LoRA scale numerator of policy and critic")
    target_modules: str = Field(
        "all-linear", description="`all-linear` (on a mixture of experts: attention only), or module names"
    )
    critic: Literal["lora", "full"] = Field("lora", description="shares the frozen base, or an own copy (paper)")
    critic_rank: int = Field(8, ge=1, le=512, description="LoRA rank of the `lora` critic")
    critic_modules: tuple[str, ...] = Field(
        ("mlp",),
        min_length=1,
        description="what of the critic trains beside the head; token mixers and routers stay frozen",
    )

    kl_coef: float = Field(0.02, ge=0, description="anchor to the base; 0 = the paper's loss")
    kl_estimator: Literal["full", "sampled"] = Field("full", description="whole vocabulary, or k3 on sampled tokens")
    negative_scale: float = Field(0.3, ge=0, le=1, description="damping of negative advantages; 1 = the paper")
    advantage_scale: Literal["none", "rms"] = Field(
        "none", description="divide by the running RMS (at least 0.05), never centre"
    )

    on_shift: Literal["none", "pull"] = Field("pull", description="what an alarm of the change-point test does")
    shift_pull: float = Field(0.1, ge=0, lt=1, description="LoRA B is multiplied by this on an alarm")
    shift_threshold: float = Field(8.0, gt=0, description="CUSUM alarm, in nats")
    shift_min_mean: float = Field(0.45, ge=0, lt=1, description="no alarm while rewards were below this share")
    shift_dead_time: int = Field(12, ge=0, description="rewards after an alarm without another")

    publish_every: int = Field(1, ge=1, description="updates between published versions")
    max_kl: float = Field(3.0, gt=0, description="nats a token from the base above which a version is rejected")

    @field_validator("critic_modules", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value

    @field_validator("eps_low")
    @classmethod
    def _eps_low(cls, value: float) -> float:
        if not 0 < value < 1:
            raise ValueError(
                "the DIS band is an offset, so ratios must lie above 1 - eps_low and eps_low inside (0, 1). "
                "The paper uses 0.3 (accept above 0.7) for chat and reasoning, 0.8 for coding agents"
            )
        return value

    @field_validator("eps_high")
    @classmethod
    def _eps_high(cls, value: float) -> float:
        if not 1 <= value < float("inf"):
            raise ValueError(
                f"the DIS band is an offset, so this accepts ratios only up to {1 + value:g} and masks bf16 noise. "
                "The paper uses 5.0 (accept up to 6.0) for chat and reasoning, 3.0 for coding agents"
            )
        return value

    @model_validator(mode="after")
    def _not_bounds(self) -> Self:
        for low, high in ((0.7, 6.0), (0.2, 4.0)):
            if (self.eps_low, self.eps_high) == (low, high):
                raise ValueError(
                    f"eps_low = {low:g}, eps_high = {high:g} are the paper's bounds, not its offsets: "
                    f"give eps_low = {1 - low:g}, eps_high = {high - 1:g}"
                )
        return self

    @property
    def band(self) -> Band:
        return Band.from_offsets(self.eps_low, self.eps_high)

    def resolved_policy_lr(self, hidden_size: int) -> float:
        """Our rule: the measured rate, scaled by 1/width, so that a wider base is moved by about as much a step."""
        return self.policy_lr or TUNED_POLICY_LR * TUNED_WIDTH / hidden_size

    def resolved_policy_eps(self, trained_weights: int) -> float:
        """Our rule: 0.3 of the root mean square of a gradient of norm 0.1; 1e-4 on the tiny model, as measured."""
        return self.policy_eps or 0.03 / trained_weights**0.5

    def resolved_critic_lr(self, hidden_size: int) -> float:
        return self.critic_lr or TUNED_CRITIC_LR * TUNED_WIDTH / hidden_size


class LearnerTable(TrainingSettings):
    """The `[learner]` table: the hyper-parameters and how the process runs."""

    threads: int = Field(1, ge=1, description="CPU threads; a replay repeats bytes only with the same number")
    lease_s: float = Field(10.0, gt=0, description="how long a dead learner blocks the next one")
    poll_s: float = Field(0.05, gt=0, le=5, description="pause between looks at an idle log")
    score_workers: int = Field(4, ge=1, le=256, description="sessions that each signal's scorer is given at once")
    score_timeout_s: float = Field(120.0, gt=0, description="a scorer that has not answered by then has failed")
    score_retry_s: float = Field(1.0, gt=0, description="pause before a failed scorer is tried again; it doubles")

    @property
    def training(self) -> TrainingSettings:
        return TrainingSettings(**self.model_dump(include=set(TrainingSettings.model_fields)))


class LearnerSettings(SharedSettings):
    """The learning process."""

    learner: LearnerTable = LearnerTable()
