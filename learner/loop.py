"""The fold over the log: one event at a time, log -> rollouts -> trainer -> publisher."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from app.events.log import EventLog, LogUnavailable, Record
from app.events.schema import (
    BadEvent,
    CompletionEvent,
    Event,
    FeedbackEvent,
    ForgetEvent,
    RollbackEvent,
    ScoreEvent,
    decode,
)
from app.registry import Registry
from app.registry.errors import NumberTaken
from app.registry.records import Lease, VersionRecord
from learner import checkpoint
from learner.joins import Joined
from learner.patience import Patience
from learner.projector import Projector
from learner.publisher import Lineage, Publisher
from learner.report import UpdateReport, count_kinds
from learner.rollouts import Rollout, build_rollout
from learner.scoring import Scoring
from learner.signals import Judgement, Signals
from learner.stream import Length, StreamState, tokens_a_rollout, tokens_a_turn
from learner.trainer import Trainer

READ_LIMIT = 16

log = logging.getLogger(__name__)


class Learner:
    """Applies events in order; its whole state is in the newest checkpoint and the log after it.

    Args:
        vocabulary: token ids of the base; a completion with others is no event of this policy.
        on_rollback: told of each rollback before it is checked; a replay moves its own registry's epoch on.
        show_progress: whether the log's monitoring follows this learner; a replay is not what operators watch.
        signals: the rewards that count, and for how much; the scorers' are also known to the stream's joins.
        scoring: has complete sessions scored; None where all that is needed is the scores on the log.
    """

    def __init__(
        self,
        policy: str,
        events: EventLog,
        registry: Registry,
        trainer: Trainer,
        publisher: Publisher,
        stream: StreamState,
        vocabulary: int,
        on_rollback: Callable[[RollbackEvent], None] = lambda event: None,
        show_progress: bool = True,
        signals: Signals | None = None,
        scoring: Scoring | None = None,
    ) -> None:
        self._policy = policy
        self._log = events
        self._registry = registry
        self._trainer = trainer
        self._publisher = publisher
        self._vocabulary = vocabulary
        self._on_rollback = on_rollback
        self._show_progress = show_progress
        self._signals = signals or Signals()
        self._scoring = scoring
        self._unscored: list[Joined] = []
        self._known_end: dict[int, int] = {}
        self._patience = Patience(lambda: True)
        self.stream = stream
        self._beginning = stream.state()
        self._initial = publisher.write_initial(trainer)

    def resume(self, lease: Lease) -> None:
        """Go on under a lease from the newest checkpoint, or from the start, whatever was done since."""
        self._lease = lease
        self._projector = Projector(self._registry, self._policy, lease)
        newest = self._registry.versions.newest_checkpoint(self._policy)
        if self._scoring is not None:
            self._scoring.clear()
            self._known_end = self._patience(self._log.end_positions)
        if newest is None:
            checkpoint.read_trainer(self._initial, self._trainer)
            self.stream.load_state(self._beginning)
            self._projector.resumed(0, [], [], [])
            self._unscored = []
            log.info("no checkpoint: starting from the base at the beginning of the log")
            return
        path = self._publisher.path(newest.number)
        checkpoint.read_trainer(path, self._trainer)
        self.stream.load_state(checkpoint.read_stream(path))
        self._resume_held()
        self._show_published(newest)
        log.info("resuming from version %d at %s", newest.number, self.stream.positions)

    def _resume_held(self) -> None:
        """Sessions that the checkpoint holds for scores are scored again, or taken where the settings ask for none."""
        joins = self.stream.joins
        released = joins.release()
        self._unscored = joins.held()
        sessions = [joined.session_id for joined in self._unscored]
        parked = [session for session in sessions if joins.parked(session)]
        self._projector.resumed(self.stream.updates, joins.waiting(), sessions, parked)
        for joined in released:
            self._take(joined)

    def _show_published(self, version: VersionRecord) -> None:
        """A crash after a version's registration may have left its updates without its name."""
        before = self._registry.versions.list(self._policy, 1, version.number)
        first = before[0].update_count + 1 if before else 1
        self._projector.published(range(first, version.update_count + 1), version.number)

    def run(self, keep_on: Callable[[], bool], idle: Callable[[], bool]) -> None:
        """Consume until `keep_on` says stop, or until the log is at its end and `idle` says stop.

        A log that is away is waited for. Raises LeaseLost where another learner has taken over, RegistryUnavailable
        where the registry is away; after either, `resume` begins again.
        """
        self._patience = Patience(keep_on)
        try:
            self._consume(keep_on, idle)
        except LogUnavailable:
            if keep_on():
                raise
            log.info("stopped while the log was away")

    def _consume(self, keep_on: Callable[[], bool], idle: Callable[[], bool]) -> None:
        while keep_on():
            records = [] if self._paused() else self._patience(self._log.read, self.stream.positions, READ_LIMIT)
            for record in records:
                if not keep_on():
                    return
                self.step(record)
            self._projector.flush()
            self._hand_over()
            if not records and not idle():
                return

    def _paused(self) -> bool:
        return self._registry.policies.get(self._policy).learning_paused

    def step(self, record: Record) -> None:
        """Apply one record; one that is no event of this policy goes to the dead letters."""
        partition, offset = record.position
        self.stream.positions[partition] = offset + 1
        try:
            event = decode(record.payload)
            self._check(event)
        except BadEvent as error:
            self._patience(self._log.bury, record, str(error), self.stream.now)
            self.stream.counters["dead_letter"] += 1
            log.warning("record %s goes to the dead letters: %s", record.position, error)
            return
        self.stream.now = max(self.stream.now, event.at)
        self._apply(event, record)
        if len(self.stream.ready) >= self._trainer.settings.rollouts_per_update:
            self._train()

    def _check(self, event: Event) -> None:
        if event.policy != self._policy:
            raise BadEvent(f"policy: {event.policy!r} on the log of {self._policy!r}")
        if isinstance(event, CompletionEvent):
            tokens = event.prompt_ids + event.completion_ids
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
                raise BadEvent(f"prompt_ids or completion_ids: outside the vocabulary of {self._vocabulary} tokens")
            if event.trainable and not event.prompt_ids:
                raise BadEvent("prompt_ids: empty, though the completion is trainable")
        if isinstance(event, FeedbackEvent | ScoreEvent):
            self._signals.check(event)
        if isinstance(event, RollbackEvent):
            self._check_rollback(event)

    def _check_rollback(self, event: RollbackEvent) -> None:
        """A rollback is in the registry before it is on the log; one that is not there is nobody's."""
        newest = self._registry.versions.latest_number(self._policy)
        if event.to > newest:
            raise BadEvent(f"to: there is no version {event.to}; the newest is {newest}")
        self._on_rollback(event)
        reached = self._registry.policies.get(self._policy).epoch
        if event.epoch > reached:
            raise BadEvent(f"epoch: {event.epoch}, but the registry is in epoch {reached}")

    def _apply(self, event: Event, record: Record) -> None:
        for session in self.stream.joins.expire(self.stream.now):
            self.stream.counters["expired"] += 1
            self._projector.outcome([session], "expired")
            self._score_no_more(session)
        if isinstance(event, RollbackEvent):
            self._roll_back(event)
            return
        if isinstance(event, CompletionEvent) and self.stream.joins.is_new(event):
            self._projector.completion(event, record.position)
        if isinstance(event, ForgetEvent):
            self._projector.outcome([event.session_id], "dropped")
            self._score_no_more(event.session_id)
        if isinstance(event, ScoreEvent):
            self._count_score(event)
        joined = self.stream.joins.apply(event, record.position)
        if joined is not None:
            self._take(joined)
        elif isinstance(event, ScoreEvent):
            self._show_held(event.session_id)

    def _count_score(self, event: ScoreEvent) -> None:
        """Count what a scorer says of a session that waits for it; of a failure that parks the session, the first."""
        joins = self.stream.joins
        if event.signal in joins.missing(event.session_id):
            if event.failure is None:
                self.stream.scores[f"{event.signal}.scored"] += 1
            elif event.signal not in joins.parked(event.session_id):
                self.stream.scores[f"{event.signal}.failed"] += 1

    def _show_held(self, session: str) -> None:
        joins = self.stream.joins
        if joins.missing(session):
            self._projector.outcome([session], "parked" if joins.parked(session) else "scoring")

    def _take(self, joined: Joined) -> None:
        """Have a finished rollout scored, queue it for the next update, or drop it with the reason."""
        session = joined.session_id
        completions, judgements = self._read(joined)
        reason = self._reason_to_drop(self._build(joined.session_id, completions, judgements))
        missing = self.stream.joins.missing(session)
        if reason is None and missing:
            self._unscored.append(joined)
            self._show_held(session)
            return
        self._score_no_more(session)
        if reason is None and not self._signals.rewarded(judgements):
            reason = "no_reward"
        if reason is None:
            if self.stream.joins.scored:
                self._projector.outcome([session], "waiting")
            self.stream.ready.append(joined)
            return
        self.stream.joins.drop(session)
        self.stream.counters[reason] += 1
        self._projector.outcome([session], "dropped")
        log.info("a rollout is dropped: %s", reason)

    def _hand_over(self) -> None:
        """Give the scorers what waits for them, once all that was on the log at the start is read: its score may be."""
        if self._scoring is None or any(self.stream.positions.get(p, 0) < end for p, end in self._known_end.items()):
            return
        for joined in self._unscored:
            missing = self.stream.joins.missing(joined.session_id)
            if missing:
                self._scoring.submit(joined, missing)
        self._unscored = []

    def _score_no_more(self, session: str) -> None:
        if self._scoring is not None:
            self._scoring.drop(session)

    def _reason_to_drop(self, rollout: Rollout) -> str | None:
        if rollout.turns[-1].finish_reason == "abort":  # after any other, the client asked again
            return "aborted"
        if not rollout.action_tokens:
            return "no_action_tokens"
        if self.stream.lag(rollout.oldest_version) > self._trainer.settings.max_version_lag:
            return "stale"
        return None

    def _read(self, joined: Joined) -> tuple[list[CompletionEvent], list[Judgement]]:
        """A session's events, from the log again."""
        positions = (*joined.completions, *joined.feedback, *joined.scores)
        events = [decode(self._patience(self._log.read_at, position).payload) for position in positions]
        completions = [event for event in events if isinstance(event, CompletionEvent)]
        return completions, [event for event in events if isinstance(event, FeedbackEvent | ScoreEvent)]

    def _build(self, session: str, completions: Sequence[CompletionEvent], judgements: Sequence[Judgement]) -> Rollout:
        return build_rollout(session, completions, judgements, self._signals.weights)

    def _train(self) -> None:
        stream = self.stream
        sessions = [(joined.session_id, *self._read(joined)) for joined in stream.ready]
        rollouts = [self._build(*session) for session in sessions]
        lag = max(stream.lag(rollout.oldest_version) for rollout in rollouts)
        stream.ready = []
        stream.updates += 1
        lengths = [Length.of(rollout) for rollout in rollouts]
        stream.add_lengths(lengths)
        report = replace(
            self._trainer.update(rollouts),
            number=stream.updates,
            version_lag=lag,
            rollout_tokens=tokens_a_rollout(lengths),
            turn_tokens=tokens_a_turn(lengths),
            rollout_tokens_mean=tokens_a_rollout(stream.lengths),
            turn_tokens_mean=tokens_a_turn(stream.lengths),
            tool_calls=count_kinds(completion for _, completions, _ in sessions for completion in completions),
            scores=stream.scored(),
        )
        self._projector.update(report, stream.epoch, stream.now, stream.not_trained())
        self.stream.unpublished.append(report.number)
        log.info(
            "update %d: reward %.2f (mean %.2f), masked %.1f %%, KL %.3f",
            *(report.number, report.reward, report.reward_mean),
            *(100 * (report.masked_low + report.masked_high), report.kl_to_base),
        )
        due = len(self.stream.unpublished) >= self._trainer.settings.publish_every
        if due and self._trainer.policy.changes_base():  # else the version would be the base under another name
            self._publish(report)

    def _publish(self, report: UpdateReport) -> None:
        stream = self.stream
        updates, stream.unpublished = stream.unpublished, []
        lineage, accepted = self._register(report)
        if accepted:
            self._projector.published(updates, lineage.number)
            if self._show_progress:
                self._log.mark_read(stream.positions)
            return
        stream.lineage.pop()
        stream.counters["rejected"] += 1
        self._restore(lineage.parent)
        log.warning("version %d is rejected; learning goes on from version %d", lineage.number, lineage.parent)

    def _register(self, report: UpdateReport) -> tuple[Lineage, bool]:
        """Publish under the next free number; whether the version is accepted.

        A number is taken where a version was rejected, and then a crash let other events come before it.
        """
        stream, before = self.stream, self.stream.lineage
        while True:
            lineage = Lineage(stream.version + 1, stream.parent, stream.epoch)
            stream.version = lineage.number
            stream.extend_lineage(lineage.number, self._trainer.settings.max_version_lag)
            try:
                return lineage, self._publisher.publish(lineage, self._trainer, report, stream.state(), self._lease)
            except NumberTaken as error:
                stream.lineage = before
                log.info("the next number is tried: %s", error)

    def _roll_back(self, event: RollbackEvent) -> None:
        """Restore the version that the operator chose; an event of an epoch already reached is a redelivery."""
        if event.epoch <= self.stream.epoch:
            return
        self._restore(event.to)
        self.stream.epoch = event.epoch
        self.stream.lineage = [number for number in self.stream.lineage if number < event.to]
        if event.to:
            self.stream.lineage.append(event.to)
        log.info("rolled back to version %d; epoch %d begins", event.to, event.epoch)

    def _restore(self, version: int) -> None:
        path = self._publisher.path(version) if version else self._initial
        checkpoint.read_trainer(path, self._trainer)


def wait(seconds: float) -> Callable[[], bool]:
    """An `idle` that pauses and goes on."""

    def idle() -> bool:
        time.sleep(seconds)
        return True

    return idle


def stop_at_end() -> bool:
    """An `idle` that ends the run when the log is at its end."""
    return False
