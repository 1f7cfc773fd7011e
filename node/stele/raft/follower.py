"""Following: takes a leader's entries, heartbeats and commit index; starts a pre-vote if no leader is heard
(Raft §5.3, 9.6).

Acts for a voter, a learner and a replica outside its configuration: `RaftState.role` says which. A Follower
lives for one term.

Invariants: entries at or below the commit index are never dropped. What is acknowledged matches the leader's
log and is durable. This replica raises its own term only after a majority would vote for it, or when the
leader or an administrator asks for the election.
"""

from __future__ import annotations

from stele.model.config import MemberType
from stele.model.entry import Entry
from stele.model.ids import OpId, ReplicaId
from stele.raft.any_role import (
    answer_pre_vote,
    answer_vote_request,
    refuse_old_term,
    take_vote_response,
    would_vote,
)
from stele.raft.ballot import Ballot
from stele.raft.effects import ConfigChanged, ProposalLost, Role
from stele.raft.events import Tick
from stele.raft.messages import TimeoutNow, UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from stele.raft.role import Switch
from stele.raft.state import RaftState
from stele.raft.timer import NEVER_MS


class Follower:
    """A replica that neither leads nor stands for election, in one term."""

    __slots__ = ("pre_vote", "state", "switch", "told_commit", "verified_index")

    def __init__(self, state: RaftState, switch: Switch) -> None:
        self.state = state
        self.switch = switch
        self.verified_index = 0
        """Up to here the log is known to match the log of this term's leader. Never falls."""
        self.told_commit = 0
        """The highest commit index that this term's leader has sent. Never falls."""
        self.pre_vote: Ballot | None = None
        """The pre-vote under way."""

    @property
    def caught_up_ms(self) -> int | None:
        """A time on the owner's clock. All entries that were committed by then have been handed out.

        None: since its start, this replica knows no such time.
        """
        state = self.state
        if state.log.handed_index >= self.told_commit and state.term_committed and state.heard_ms is not None:
            return state.heard_ms
        return state.caught_up_ms

    # A leader's messages

    def on_update_request(self, sender: ReplicaId, request: UpdateRequest) -> None:
        """Append new entries, follow the commit index, and acknowledge what matches and is durable."""
        state = self.state
        if request.term != state.term:
            if request.term < state.term:
                refuse_old_term(state, sender, request)
            else:
                self.switch.adopt_term(request.term, f"replica {sender} is at term {request.term}")
                self.switch.receive(sender, request)
            return
        if state.leader != sender:
            if not self._follow(sender):
                return
        elif state.term_leader is None:
            state.term_leader = sender  # it was named to lead, and now it leads
        log = state.log
        self._hear()
        if request.commit_index > self.told_commit:
            self.told_commit = request.commit_index
        if request.all_replicated_index > state.all_replicated_index:
            state.all_replicated_index = min(request.all_replicated_index, log.last_index)
        entries = request.entries
        preceding = request.preceding
        commit_index = state.commit_index
        if preceding.index > commit_index and log.term_at(preceding.index) != preceding.term:
            self._refuse_gap(sender, request)
            return
        new = entries if preceding.index == log.last_index else self._missing_entries(sender, entries)
        if new:
            first = new[0]
            if first.index != log.last_index + 1 or first.term < log.last_term:
                state.ignore(sender, f"its entry {first.opid} cannot follow {log.last_opid}")
                return
            for entry in new:
                if log.append(entry) is not None:
                    self._config_changed(self._leader_has("appended"))
        verified = max(self.verified_index, commit_index, preceding.index + len(entries))
        if verified > log.last_index:
            verified = log.last_index
        self.verified_index = verified
        if self.told_commit > commit_index:
            # Not only what this message says: a heartbeat that told more may have overtaken these entries.
            known = min(self.told_commit, verified)
            if known > commit_index:
                state.commit_to(known)
                if commit_index < log.config_index:
                    state.config_committed(commit_index, self._leader_has("committed"))
                state.hand_out()
        if request.early and entries and log.dirty and not state.outbox.hard_barrier():
            # Not if the entries came before: then they are synced soon. Nor before the term is durable.
            self._answer(sender, request, min(verified, log.durable_index), 0, written=verified)
        if entries:
            # The answer waits until the entries are durable, so it may cover all that is known to match.
            self._answer(sender, request, verified, state.outbox.log_barrier())
        else:
            self._answer(sender, request, min(verified, log.durable_index), state.outbox.hard_barrier())

    def take_beat(self, leader: ReplicaId, commit_index: int, now_ms: int) -> bool:
        """As `RaftCore.take_beat`, in the same term."""
        state = self.state
        if (
            state.leader != leader
            or state.term_leader != leader
            or commit_index > self.told_commit
            or state.outbox.hard_barrier()
        ):
            return False
        state.advance_clock(now_ms)
        self._hear()
        return True

    def _hear(self) -> None:
        """The leader of this term is alive."""
        state = self.state
        if state.log.handed_index >= self.told_commit and state.term_committed:
            state.caught_up_ms = state.heard_ms
        timer, now_ms = state.timer, state.now_ms
        state.heard_ms = now_ms
        if now_ms >= timer.calm_ms:
            timer.calm(now_ms)
            state.draw_election()
        timer.due_ms = now_ms + timer.patience_ms

    def on_timeout_now(self, sender: ReplicaId, request: TimeoutNow) -> None:
        """Stand at once, as the leader asks (dissertation 3.10)."""
        state = self.state
        if request.term == state.term and state.may_campaign and self._may_take_over_from(sender):
            released = request.term if request.lease_given_up else 0
            self.switch.stand(f"replica {sender} hands over", ignore_live_leader=True, released=released)

    def _may_take_over_from(self, leader: ReplicaId) -> bool:
        """Whether this replica may take over from `leader`. A witness may not. An unfit replica may take over
        only from a witness.

        A witness serves no clients, so an unfit leader is no worse.
        """
        state = self.state
        peer = state.config.peer(leader)
        from_witness = peer is not None and peer.member_type is MemberType.WITNESS
        return not state.witness and (state.fit or from_witness)

    def _follow(self, leader: ReplicaId) -> bool:
        """Follow a new leader. Returns False if another replica is known to lead this term."""
        state = self.state
        if state.term_leader not in (None, leader):
            state.ignore(
                leader, f"it leads term {state.term}, as {state.term_leader} does: a term has one leader"
            )
            return False
        timer = state.timer
        still = timer.missed and state.term_leader == leader
        if still:
            timer.false_alarm(state.now_ms)
        timer.missed = False
        self.pre_vote = None
        state.set_role(state.resting_role, leader, f"replica {leader} leads term {state.term}")
        if still or timer.unanswered or timer.due_ms == NEVER_MS:
            timer.unanswered = 0
            state.draw_election()
        state.follow_word_of(leader)
        return True

    def _missing_entries(self, sender: ReplicaId, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        """The entries that this log lacks.

        A suffix is dropped only where the terms differ (Raft figure 2, step 3).
        """
        state = self.state
        skip = 0
        for entry in entries:
            if entry.index > state.commit_index:
                held = state.log.term_at(entry.index)
                if held is None:
                    break
                if held != entry.term:
                    self._truncate(
                        entry.index, f"leader {sender} of term {state.term} holds term {entry.term} there"
                    )
                    break
            skip += 1
        return entries[skip:]

    def _truncate(self, from_index: int, why: str) -> None:
        """Drop a suffix that the leader's log replaces. A configuration in it is undone."""
        state = self.state
        # Answers under way may acknowledge the suffix, and wait for its Persist. So it is persisted before it
        # is dropped.
        state.outbox.persist()
        config_index = state.log.config_index
        for entry in state.log.truncate(from_index):
            state.outbox.others.append(ProposalLost(entry.opid))
        state.pending.truncated(from_index)
        if config_index >= from_index:
            self._config_changed(f"undone: {why}")

    def _config_changed(self, why: str) -> None:
        """Tell the owner of the new active configuration, and take the role that it gives to this replica."""
        state = self.state
        state.judge_witness()
        state.outbox.others.append(ConfigChanged(state.config, False, state.because(why)))
        role = state.resting_role
        if role is not state.role:
            self.pre_vote = None
            state.set_role(role, state.leader, why)
            state.draw_election()

    def _leader_has(self, done: str) -> str:
        return f"leader {self.state.leader} of term {self.state.term} has {done} it"

    def _refuse_gap(self, sender: ReplicaId, request: UpdateRequest) -> None:
        """Refuse, and name where the next probe should end: before the conflicting term (Raft §5.3)."""
        state = self.state
        log = state.log
        at = request.preceding.index
        conflict_term = log.term_at(at)
        if conflict_term is None:
            conflict_index, conflict_term = log.last_index + 1, 0
        else:
            conflict_index = max(log.first_of_term(at), state.commit_index + 1)
        response = UpdateResponse(
            state.term,
            False,
            log.last_opid,
            conflict_index,
            conflict_term,
            request.read_context,
            request.sent_ms,
            state.has_data,
            False,
            at,
            state.promise_lease(request) if request.lease_ms else 0,
        )
        state.outbox.send(sender, response, state.outbox.hard_barrier())

    def _answer(
        self, sender: ReplicaId, request: UpdateRequest, vouched: int, after: int, written: int = 0
    ) -> None:
        """Acknowledge the log up to `vouched`, once the Persist `after` is durable.

        With `written`, the answer leaves earlier: once the log is in its file up to that index, though not
        synced.
        """
        state = self.state
        log = state.log
        last = log.opid_at(vouched) if vouched >= log.start.index else OpId(0, vouched)
        response = UpdateResponse(
            state.term,
            True,
            last,
            0,
            0,
            request.read_context,
            request.sent_ms,
            state.has_data,
            False,
            request.preceding.index,
            state.promise_lease(request) if request.lease_ms else 0,
            written,
        )
        if written:
            state.outbox.send_once_written(sender, response)
        else:
            state.outbox.send(sender, response, after)

    # No leader

    def on_tick(self, event: Tick) -> None:
        """Campaign if no leader was heard within the election timeout."""
        state = self.state
        state.advance_clock(event.now_ms)
        state.pending.transfer_times_out(state.now_ms)
        if state.now_ms < state.timer.due_ms:
            return
        if state.role is Role.FOLLOWER:
            if state.heard_ms is not None:  # else the connection to its node broke: nobody is slow
                state.timer.missed = True
            self.campaign("no leader heard within the election timeout")
        else:
            state.timer.due_ms = NEVER_MS

    def campaign(self, why: str) -> None:
        """Forget the leader, and start a pre-vote. A single voter stands for election at once."""
        state = self.state
        state.draw_election()
        if not state.may_campaign:
            return
        if state.leader is not None:
            state.set_role(Role.FOLLOWER, None, why)
        self.ask_around(why)

    def ask_around(self, why: str) -> None:
        """Start the pre-vote. If this is the only voter, stand for election at once. While a promise to a leader
        forbids that, wait."""
        state = self.state
        if state.bound():
            if not state.leads_if_nobody_can:
                state.timer.draw_after(state.now_ms, state.promise.until_ms + 1)
            return
        if state.config.majority == 1:
            self.switch.stand(why, ignore_live_leader=False)
            return
        self.pre_vote = Ballot(state, state.term + 1, pre_vote=True, ignore_live_leader=False)
        self.pre_vote.take_own()
        self.pre_vote.ask()

    def on_vote_request(self, sender: ReplicaId, request: VoteRequest) -> None:
        """Answer as every role does. Of two replicas whose pre-votes cross, one gives way.

        Otherwise both would stand and split the votes. When many tablets lose their leader at the same moment, all
        their elections could fail that way, again and again.
        """
        state = self.state
        if request.pre_vote and self.pre_vote is not None and would_vote(state, sender, request):
            if self._goes_before(sender, request):
                answer_pre_vote(state, sender, request, False)
                return
            self._give_way()
        answer_vote_request(self, sender, request)

    def _give_way(self) -> None:
        self.pre_vote = None

    def _goes_before(self, other: ReplicaId, request: VoteRequest) -> bool:
        """Whether this replica stands and `other`, which also asks for votes, gives way. If their logs are equal,
        the one with the lower id stands."""
        state = self.state
        equal = state.log.last_opid == request.last_logged
        return equal and state.self_replica < other and not state.leads_if_nobody_can

    def on_vote_response(self, sender: ReplicaId, response: VoteResponse) -> None:
        """Stand for election once a majority would vote for this replica."""
        if not take_vote_response(self, sender, response):
            return
        ballot = self.pre_vote
        if ballot is None or not ballot.take(sender, response):
            return
        state = self.state
        config = state.config
        granted = ballot.granted
        if len(granted) >= config.majority:
            by = ",".join(map(str, granted))
            self.switch.stand(f"would get the votes of {by}", ignore_live_leader=False)
        elif len(ballot.refused) > len(config.voters) - config.majority or ballot.all_have_voted:
            # A pre-vote raises no term, so the next attempt may come sooner than after a lost election.
            # Voters that refused may not have noticed yet that the leader is gone.
            self.pre_vote = None
            if not state.leads_if_nobody_can:
                low, high = state.options.election_min_ms // 2, state.options.election_max_ms // 2
                state.timer.draw_within(state.now_ms, low, high)
